"""How models write conversations: what a chat becomes as a prompt, and what an output says. Pure.

conversation.py     turns, tools and calls, in no API's and no model's words
replies.py          an output as reasoning, text and calls, while it comes
scanning.py         what the readers of both formats have in common
glm.py              calls as GLM writes them
hermes.py           calls as JSON objects, as A.X-K2 writes them
deepseek.py         calls as DeepSeek-V3.2 writes them (DSML), and its prompts, for which it ships no template
arguments.py        arguments of a call as JSON
lark.py             grammars, put together from parts
call_grammars.py    arguments of tools as grammars
known.py            which format a served model has
"""
