"""GLM-5, GLM-5.1, GLM-5.2 and GLM-5.3: DeepSeek-V3.2's layers, of which some share a selection."""

from __future__ import annotations

from typing import Final

from worker.families.base import SHARING
from worker.families.latent import LatentFamily

#: In the form of the published template.
_TEMPLATE: Final = """\
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

GLM_MOE_DSA: Final = LatentFamily(
    model_type="glm_moe_dsa",
    name="glm-5",
    config_class="GlmMoeDsaConfig",
    models={"glm-5": {}},
    read=SHARING,
    fixed={"indexer_rope_interleave": (True,)},
    index_interleaves=True,
    chat="glm",
    template=_TEMPLATE,
)
