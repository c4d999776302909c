"""The engines: how bytes get from one host page to another. Each has a Target (receiver) and a Source (sender).

    base.py       what they implement, and the two that write through a network share
    shared.py     memcpy into the mapped pool file of the same host
    nixl.py       NIXL, UCX backend        (extra `nixl`)
    mooncake.py   Mooncake Transfer Engine (extra `mooncake`)

All calls come from the thread of one end.
"""
