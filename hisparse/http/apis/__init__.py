"""APIs of OpenAI and Anthropic: bodies, and the words of answers. Pure, but for processes that check large bodies."""
