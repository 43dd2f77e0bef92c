"""Chat templates with the constructs of well-known models' templates, written for these tests; none is a copy.

Their licences differ, and some do not allow copies. Every feature that matters for the tokens of the assistant is kept:
roles and their order, system messages, tools, thinking, white space, and the tokens that end a message and a
conversation.
"""

QWEN_3 = r"""{%- macro call(x) %}{{ '<tool_call>\n' ~ x.function | tojson ~ '\n</tool_call>' }}{% endmacro %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n' ~ (messages[0].content ~ '\n' if messages[0].role == 'system' else '') }}
{{- '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set parts = m.content.split('</think>') %}
    {%- set thought = parts[0].replace('<think>', '').strip('\n') if parts | length > 1 else '' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > last.query and (loop.last or thought) %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- parts[-1].lstrip('\n') }}{% for c in m.tool_calls or [] %}{{ call(c) }}{% endfor %}{{ '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
  {%- elif not (tools and loop.first and m.role == 'system') %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_25 = r"""{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = r"""{{- bos_token }}{% set date = '26 Jul 2024' if date is not defined else date %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' ~ date ~ '\n\n' ~ system ~ '<|eot_id|>' }}
{%- for m in rest %}{{ '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA_2 = r"""{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim }}
  {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_3 = r"""{{- bos_token }}{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
  {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (system if loop.first else '') }}
  {{- m.content | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = r"""{{- bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
  {%- if m.role == 'user' %}{{ '<INST> ' ~ (system ~ '\n\n' if loop.first else '') ~ m.content ~ '</INST>' }}
  {%- else %}{{ ' ' ~ m.content | trim ~ eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL_LAST = MISTRAL.replace("loop.first", "system and (loop.last or loop.index == loop.length - 1)")

MIDDLE = """{% for m in messages %}{{ m.role }}: {{ m.content[:1] }}{{ '(end)' if loop.last }}{{ m.content[1:] }}.
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

PHI_3 = r"""{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""

PHI_4 = r"""{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

SYSTEM = [{"role": "system", "content": "S"}]
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": " Ok "},
]
CALL = {"arguments": {"x": 1}, "name": "f"}
TOOLS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Yo"},
]
THOUGHTS = [*TURNS[:1], {"role": "assistant", "content": "<think>\nA\n</think>\n\nYo"}, *TURNS[2:3]]
THOUGHTS += [{"role": "assistant", "content": "<think>\nB\n</think>\n\nOk"}]
JSON = '{"arguments": {"x": 1}, "name": "f"}'
Q = "<|im_start|>"
E = "<|im_end|>\n"
H, T = "<|start_header_id|>", "<|end_header_id|>\n\n"
# name -> (template, messages, the text with the tokens that are trained in brackets)
CASES = {
    "llama 3": (
        LLAMA_3,
        SYSTEM + TURNS,
        f"<s>{H}system{T}Today: 26 Jul 2024\n\nS<|eot_id|>{H}user{T}Hi<|eot_id|>{H}assistant{T}[Yo<|eot_id|>]"
        f"{H}user{T}?<|eot_id|>{H}assistant{T}[Ok<|eot_id|>]",
    ),
    "llama 3, tools": (
        LLAMA_3,
        TOOLS,
        f"<s>{H}system{T}Today: 26 Jul 2024\n\n<|eot_id|>{H}user{T}Hi<|eot_id|>{H}assistant{T}[{JSON}<|eot_id|>]"
        f"{H}ipython{T}2<|eot_id|>{H}assistant{T}[Yo<|eot_id|>]",
    ),
    "qwen 2.5": (
        QWEN_25,
        TURNS,
        f"{Q}system\nBe good.{E}{Q}user\nHi{E}{Q}assistant\n[Yo{E}]{Q}user\n?{E}{Q}assistant\n[ Ok {E}]",
    ),
    "qwen 3": (
        QWEN_3,
        SYSTEM + TURNS,
        f"{Q}system\nS{E}{Q}user\nHi{E}{Q}assistant\n[Yo{E}]{Q}user\n?{E}"
        f"{Q}assistant\n[<think>\n\n</think>\n\n Ok {E}]",
    ),
    "qwen 3, thoughts": (
        QWEN_3,
        THOUGHTS,
        f"{Q}user\nHi{E}{Q}assistant\n[Yo{E}]{Q}user\n?{E}{Q}assistant\n[<think>\nB\n</think>\n\nOk{E}]",
    ),
    "qwen 3, tools": (
        QWEN_3,
        TOOLS,
        f"{Q}user\nHi{E}{Q}assistant\n[<tool_call>\n{JSON}\n</tool_call>{E}]"
        f"{Q}user\n<tool_response>\n2\n</tool_response>{E}{Q}assistant\n[<think>\n\n</think>\n\nYo{E}]",
    ),
    "gemma 2": (
        GEMMA_2,
        TURNS,
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[Yo<end_of_turn>\n]"
        "<start_of_turn>user\n?<end_of_turn>\n<start_of_turn>model\n[Ok<end_of_turn>\n]",
    ),
    "gemma 3": (
        GEMMA_3,
        SYSTEM + TURNS,
        "<s><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\n[Yo<end_of_turn>\n]"
        "<start_of_turn>user\n?<end_of_turn>\n<start_of_turn>model\n[Ok<end_of_turn>\n]",
    ),
    "mistral": (MISTRAL, SYSTEM + TURNS, "<s><INST> S\n\nHi</INST>[ Yo</s>]<INST> ?</INST>[ Ok</s>]"),
    "phi 3": (
        PHI_3,
        SYSTEM + TURNS,
        "<|system|>\nS<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[Yo<|end|>\n]"
        "<|user|>\n?<|end|>\n<|assistant|>\n[ Ok <|end|>\n<|endoftext|>]",
    ),
    "phi 4": (
        PHI_4,
        SYSTEM + TURNS,
        f"{Q}system<|im_sep|>S<|im_end|>{Q}user<|im_sep|>Hi<|im_end|>{Q}assistant<|im_sep|>[Yo<|im_end|>]"
        f"{Q}user<|im_sep|>?<|im_end|>{Q}assistant<|im_sep|>[ Ok <|im_end|>]",
    ),
}
