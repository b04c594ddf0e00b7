"""The processes of a run: told, started, watched, started again, ended."""
