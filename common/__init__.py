"""What coordinator, front, CLI and client share, and workers and the wire do not need.

Internal to hisparse: programs import only `hisparse`.
"""
