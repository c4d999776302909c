"""What coordinator, worker and clients share: the wire protocol, errors, settings, units and the transport.

Internal to hisparse: programs import `hisparse` alone.
"""
