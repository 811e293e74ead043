"""Programs that each ask one question of the machine where they run: `python -m dflash.probes.NAME`."""
