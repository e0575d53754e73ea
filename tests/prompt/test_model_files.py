import json

import pytest

from extproc.core.errors import WarmrouteError
from extproc.prompt.model_files import ModelFiles


def write(path, **files):
    for name, content in files.items():
        target = path / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_an_empty_directory_has_no_template(tmp_path):
    files = ModelFiles.read(tmp_path, None)
    assert files.templates == {}
    assert files.chat_unsupported is None


def test_template_files_come_before_the_configuration(tmp_path):
    write(tmp_path, tokenizer_config_json={"chat_template": "config"})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "config"}
    write(tmp_path, chat_template_jinja="file")
    assert ModelFiles.read(tmp_path, None).templates == {"default": "file"}
    write(tmp_path, additional_chat_templates__rag_jinja="rag")
    assert ModelFiles.read(tmp_path, None).templates == {"default": "file", "rag": "rag"}


def test_named_templates_can_be_chosen(tmp_path):
    entries = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, tokenizer_config_json={"chat_template": entries})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "a", "tool_use": "b"}
    assert ModelFiles.read(tmp_path, "tool_use").templates == {"default": "b"}


def test_a_missing_template_file_is_named(tmp_path):
    with pytest.raises(WarmrouteError, match=r"absent\.jinja"):
        ModelFiles.read(tmp_path, tmp_path / "absent.jinja")
    with pytest.raises(WarmrouteError, match="absent"):
        ModelFiles.read(tmp_path, "absent")


@pytest.mark.parametrize(
    "multimodal",
    [
        {"preprocessor_config_json": {"processor_class": "LlavaProcessor"}},
        {"processor_config_json": {"processor_class": "LlavaProcessor"}},
        {"config_json": {"model_type": "llava", "vision_config": {}}},
        {"tokenizer_config_json": {"chat_template": "tokenizer", "processor_class": "LlavaProcessor"}},
    ],
)
def test_a_processors_template_renders_what_has_no_tools(tmp_path, multimodal):
    write(tmp_path, tokenizer_config_json={"chat_template": "tokenizer"})
    write(tmp_path, chat_template_json={"chat_template": "processor"}, **multimodal)
    files = ModelFiles.read(tmp_path, None)
    assert files.templates == {"default": "processor", "tool_use": "tokenizer"}
    assert files.template_origin == str(tmp_path / "chat_template.json")


def test_a_processors_template_may_be_the_only_one(tmp_path):
    write(tmp_path, preprocessor_config_json={}, chat_template_json={"chat_template": "processor"})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "processor"}


def test_a_processors_configuration_comes_before_its_file_and_both_before_the_tokenizers(tmp_path):
    write(tmp_path, chat_template_jinja="both", chat_template_json={"chat_template": "file"})
    write(tmp_path, processor_config_json={"processor_class": "LlavaProcessor"})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "file", "tool_use": "both"}
    write(tmp_path, processor_config_json={"chat_template": "configuration"})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "configuration", "tool_use": "both"}


def test_a_processors_template_without_a_processor_is_not_read(tmp_path):
    write(tmp_path, config_json={"model_type": "qwen2"}, tokenizer_config_json={"chat_template": "tokenizer"})
    write(tmp_path, chat_template_json={"chat_template": "processor"})
    assert ModelFiles.read(tmp_path, None).templates == {"default": "tokenizer"}


def test_a_template_that_is_given_comes_before_the_processors(tmp_path):
    write(tmp_path, preprocessor_config_json={}, chat_template_json={"chat_template": "processor"})
    assert ModelFiles.read(tmp_path, "given {{ x }}").templates == {"default": "given {{ x }}"}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "harmony"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepSeek"),
        ({"model_type": "paligemma"}, "comes with the engine"),
    ],
)
def test_what_the_engine_renders_differently_is_recognised(tmp_path, config, part):
    assert part in ModelFiles.read(write(tmp_path, config_json=config), None).chat_unsupported


def test_mistrals_own_format_is_recognised(tmp_path):
    write(tmp_path, tekken_json="{}")
    assert ModelFiles.read(tmp_path, None).tokenizer_unsupported is None
    (tmp_path / "consolidated.00.safetensors").touch()
    assert ModelFiles.read(tmp_path, None).tokenizer_unsupported == "Mistral"
