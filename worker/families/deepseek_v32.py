"""DeepSeek-V3.2: each layer selects for itself."""

from __future__ import annotations

from typing import Final

from worker.families.latent import LatentFamily

#: The published repository has none. Tokens of a tiny checkpoint are bytes, so that no special token shows its format.
_TEMPLATE: Final = """\
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

DEEPSEEK_V32: Final = LatentFamily(
    model_type="deepseek_v32",
    name="deepseek-v3.2",
    config_class="DeepseekV32Config",
    models={"deepseek-v3.2": {}},
    fixed={"indexer_rope_interleave": (False,), "index_topk_freq": (1,)},
    index_interleaves=False,
    chat="dsml",
    template=_TEMPLATE,
)
