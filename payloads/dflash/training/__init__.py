"""How a drafter is trained, in parts that `python -m dflash.train` ties together.

`config` holds every number, read by `config_file` and started from `presets`. `micro_batch` is what a target
worker hands over, through `queue` (threads) or `mail` (processes) and over `transfer` between cards; `step`
makes one optimizer step of several, with `noise` on the features and the rate of `schedule`, by way of
`gradients` that `ranks` sum over drafters; `validation` measures; `sums` are the figures of both; `seeds`
says what is drawn, whoever draws it; `failures` are the errors. `checkpoints` has what an exact resume needs,
`signals` how a training is asked to end, `journal` what it tells.
"""
