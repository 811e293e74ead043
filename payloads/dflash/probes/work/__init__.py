"""What the probes do, once their parameters are accepted; everything here may load torch.

`machine` is the device with its memory and clock, `workload` the drafter and its rows, `trials` what may not
fit, `tables` how results are told. The other modules are one probe's work each, or a part of it.
"""
