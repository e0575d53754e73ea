"""What fuzzing is fed with: nearly right values, for what is quite wrong is refused at the first look."""

import json

from hypothesis import strategies as st

WORDS = """
    model messages role content type text input_text user assistant system tool developer tools function name
    arguments parameters tool_calls tool_call_id id prompt input instructions metadata user_id max_tokens
    max_completion_tokens n stream chat_template_kwargs enable_thinking reasoning_effort documents
    continue_final_message add_generation_prompt add_special_tokens truncate_prompt_tokens cache_salt
    tool_choice none auto tool_use tool_result tool_use_id input_schema thinking refusal image_url
    prompt_cache_key expected_output_tokens kv_transfer_params prompt_token_ids output function_call
    function_call_output call_id arguments reasoning summary tiny
""".split()  # noqa: SIM905

odd_text = st.text(max_size=12) | st.sampled_from(
    ["\ud800", "\x00", "<|im_end|>", "{{ x }}", "a\r\nb ", "\u2028", "﷽", "1e999", "-", "A\u0300"]
)
text = st.sampled_from(WORDS) | odd_text
scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | text
    | st.sampled_from([10**400, -1, 0, 1 << 31, 1 << 63])
)
tree = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=5),
    max_leaves=25,
)
part = st.fixed_dictionaries({"type": text, "text": text | tree}) | tree
message = (
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | text},
        optional={
            "content": text | st.lists(part, max_size=3) | tree,
            "tool_calls": st.lists(tree, max_size=2),
            "tool_call_id": text,
            "name": text,
            "reasoning_content": tree,
            "type": text,
        },
    )
    | tree
)
body = (
    st.fixed_dictionaries(
        {"model": st.just("tiny") | tree},
        optional={
            "messages": st.lists(message, max_size=4) | tree,
            "input": text | st.lists(message, max_size=4) | tree,
            "instructions": text | tree,
            "system": text | st.lists(part, max_size=2) | tree,
            "prompt": text | st.lists(text | st.integers(-5, 1 << 33), max_size=4) | tree,
            "tools": st.lists(tree, max_size=2) | tree,
            "tool_choice": tree,
            "documents": tree,
            "chat_template_kwargs": st.dictionaries(text, tree, max_size=3) | tree,
            "reasoning_effort": text,
            "reasoning": tree,
            "thinking": tree,
            "continue_final_message": st.booleans() | tree,
            "add_generation_prompt": st.booleans() | tree,
            "truncate_prompt_tokens": st.integers(-3, 9) | tree,
            "max_tokens": scalar,
            "n": scalar,
            "metadata": tree,
            "cache_salt": tree,
            "kv_transfer_params": tree,
        },
    )
    | tree
)


def dumped(value: object) -> bytes:
    """`value` as a client would send it."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, whole):
    """Bytes of `whole`, perhaps cut, with a few changed, repeated or put in."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = draw(st.binary(max_size=3))
            case 2:
                data[at:at] = data[at : at + draw(st.integers(0, 40))]
            case _:
                del data[at : at + draw(st.integers(0, 40))]
    return bytes(data)
