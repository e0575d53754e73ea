import pytest

from extproc.analysis.vllm_log import VllmEntry, read_vllm_line

OLD = (
    "INFO 10-01 18:43:27 logger.py:36] Received request cmpl-c52d-0: prompt: 'It\\'s \"x\"\\n', params: "
    "SamplingParams(n=1, stop=[], max_tokens=16), prompt_token_ids: [1, 22, 333], lora_request: None, "
    "prompt_adapter_request: None."
)
DETAILS = (
    "(APIServer pid=7) DEBUG 02-13 11:33:33 [request_logger.py:52] Request chatcmpl-a269 details: "
    "prompt: None, prompt_token_ids: [5, 6], prompt_embeds shape: None."
)
BODY = (
    "(APIServer pid=7) DEBUG 02-13 11:33:33 [request_logger.py:75] Request a269 JSON body: "
    '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
)
PARAMETERS = "INFO 02-13 11:33:33 [logger.py:49] Received request chatcmpl-a2: params: SamplingParams(n=1)."


def test_the_old_form_has_text_and_ids():
    assert read_vllm_line(OLD) == VllmEntry("cmpl-c52d-0", "received", None, 'It\'s "x"\n', (1, 22, 333))


def test_details_have_ids():
    assert read_vllm_line(DETAILS) == VllmEntry("chatcmpl-a269", "details", None, None, (5, 6))


def test_a_body_is_read_as_json():
    entry = read_vllm_line(BODY)
    assert entry is not None
    assert (entry.form, entry.body["model"]) == ("body", "m")


def test_colours_do_not_matter():
    assert read_vllm_line(BODY.replace('{"model', '\x1b[0m{"model')) == read_vllm_line(BODY)


def test_a_line_with_parameters_only_has_no_prompt():
    assert read_vllm_line(PARAMETERS) == VllmEntry("chatcmpl-a2", "received")


@pytest.mark.parametrize("line", ["INFO: Started", "", BODY[:-9], OLD[: OLD.index("params")][:-4]])
def test_other_and_cut_lines_are_none_or_have_no_prompt(line):
    entry = read_vllm_line(line)
    assert entry is None or (entry.prompt is None and entry.body is None)
