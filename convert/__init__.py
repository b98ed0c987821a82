"""The front door: command line, configuration, run, work folder and device probe."""
