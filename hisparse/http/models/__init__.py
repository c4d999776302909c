"""Conversations in the form of the served model: templates, formats of calls and reasoning, grammars."""
