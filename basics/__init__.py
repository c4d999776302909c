"""Shared by coordinator, front, CLI and client, above the wire: requests, rates, traces and the process itself.

Internal to hisparse: programs import only `hisparse`.
"""
