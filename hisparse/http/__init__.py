"""The HTTP front: an OpenAI-compatible server that is a client of the coordinator. docs/http.md is its manual."""
