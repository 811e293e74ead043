"""The command line: main.py is its table of contents, one module per group of commands does the work."""
