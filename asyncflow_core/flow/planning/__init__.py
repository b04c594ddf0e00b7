"""From a configuration to what a run consists of, checked. Nothing is started here."""
