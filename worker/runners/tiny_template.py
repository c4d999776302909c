"""Chat templates of the tiny checkpoints: small, with tools and reasoning, in the form of each family.

GLM-5 ships a template of this kind. DeepSeek-V3.2 ships none; its tiny checkpoint has one all the same, because its
tokens are bytes, and so no special token shows which model it is.
"""

from __future__ import annotations

from typing import Final

_GLM: Final = """\
{% if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call one as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
{% endif %}
{% for m in messages %}
{% if m.role == 'assistant' %}<|assistant|>\
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>\
{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>
{% endfor %}
{% elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{% else %}<|{{ 'user' if m.role == 'user' else 'system' }}|>{{ m.content }}
{% endif %}
{% endfor %}
<|assistant|>{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
"""

_DEEPSEEK: Final = """\
{% if tools %}## Tools
Call them as <｜DSML｜function_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
<functions>
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}</functions>
{% endif %}
{% for m in messages %}
{% if m.role == 'assistant' %}
{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}
{% if m.tool_calls %}<｜DSML｜function_calls>
{% for call in m.tool_calls %}<｜DSML｜invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<｜DSML｜parameter name="{{ key }}" \
string="{{ 'true' if value is string else 'false' }}">{{ value if value is string else value | tojson }}\
</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜function_calls>{% endif %}
{% elif m.role == 'tool' %}<result>{{ m.content }}</result>
{% elif m.role == 'user' or not loop.first %}<｜User｜>{{ m.content }}<｜Assistant｜>
{% else %}{{ m.content }}
{% endif %}
{% endfor %}
{{ '<think>' if thinking is defined and thinking else '</think>' }}
"""

#: By family.
TEMPLATES: Final = {"glm-5": _GLM, "deepseek-v3.2": _DEEPSEEK}
