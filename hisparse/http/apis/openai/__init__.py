"""OpenAI's POST /v1/completions and /v1/chat/completions: bodies and answers. Pure."""
