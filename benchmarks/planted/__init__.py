"""Programs that run out of memory, each for a reason of its own, and how many of the reasons `orch` names.

``python -m benchmarks.planted [--only NAME]… [--json FILE]``, on a machine with a card on which nothing else
runs. Each program goes through ``orch run --host local`` and then ``orch explain --json``; its runs are kept
apart from the project's. Exits with 1 when fewer than eleven twelfths of the fourteen are named.
"""
