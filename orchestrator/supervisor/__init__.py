"""What travels to a host: stdlib only, Python 3.8 or newer, importing nothing but itself.

It starts payloads detached, writes their records, and answers the controller's requests over one channel.
The controller imports `wire` and `seals` from here, so both ends share one definition of the format.
"""
