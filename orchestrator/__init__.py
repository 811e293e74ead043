"""The controller: from an experiment's file to a verdict about a run on a host."""
