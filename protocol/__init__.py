"""Shared by coordinator, worker and clients: the wire protocol, errors, settings, units and the transport.

Internal to hisparse: programs import only `hisparse`.
"""
