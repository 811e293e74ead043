"""Programs that each ask one question of the machine where they run: `python -m dflash.probes.NAME`.

    oom         does forward and backward fit?
    inference   does the forward alone fit, and how long does it take?
    backends    which attention backends fit, and how fast is each?
    anchors     does the peak move with the number of anchors?
    dispatch    which attention kernel does torch take, and why none of the others?
    bench       how fast is the drafter, beside what the card could do?

These modules know parameters and load without torch, so that a mistyped one is refused at once. What they do
is in `dflash.probes.work`.
"""
