"""OpenAI's POST /v1/responses, without stored state: bodies.py, answers.py. Pure."""
