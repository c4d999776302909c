"""Anthropic's POST /v1/messages and /v1/messages/count_tokens: bodies.py, answers.py. Pure."""
