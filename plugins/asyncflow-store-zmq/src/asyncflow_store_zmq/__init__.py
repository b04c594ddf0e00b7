"""The data store of AsyncFlow in processes of its own."""
