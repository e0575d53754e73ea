import pytest

from extproc.core.model_catalog import AliasError, ModelCatalog, UnknownModelError, resolve_aliases


def catalog(**fields):
    return ModelCatalog({"one": ["llama"], "two": ["qwen"]}, **fields)


def test_a_configured_name_leads_to_its_pool():
    assert catalog().resolve("qwen").pools == ("two",)
    assert catalog().resolve("llama").pools == ("one",)


def test_names_engines_tell_are_known_too_until_they_leave():
    models = catalog()
    models.on_models("a:1", "two", ["qwen", "qwen-alias"], ["law"])
    assert models.resolve("qwen-alias").pools == ("two",)
    assert models.resolve("law").pools == ("two",)
    assert models.adapter("two", "law") == "law"
    assert models.adapter("two", "qwen-alias") is None
    assert models.names("two") == ("qwen", "qwen-alias", "law")
    models.on_models("a:1", "two", ["qwen"], [])
    assert models.resolve("law").pools == ("one", "two")
    models.on_models("a:1", "two", ["qwen"], ["law"])
    models.keep(lambda endpoint: False)
    assert models.resolve("law").pools == ("one", "two")


def test_a_base_model_goes_before_an_adapter_of_the_same_name():
    models = catalog()
    models.on_models("a:1", "one", ["llama"], ["qwen"])
    assert models.resolve("qwen").pools == ("two",)


def test_a_name_of_several_pools_gives_all_of_them_in_order():
    models = ModelCatalog({"one": ["m"], "two": [], "three": ["m"]})
    assert models.resolve("m").pools == ("one", "three")


def test_unknown_names_pass_to_the_default_pool_or_are_refused_once_everyone_has_told():
    assert catalog().resolve("gpt-4o").pools[0] == "one"
    strict = catalog(refuse_unknown=True)
    strict.on_models("a:1", "one", ["llama"], [])
    assert strict.resolve("gpt-4o").pools == ("one", "two")
    strict.on_models("b:1", "two", ["qwen"], [])
    with pytest.raises(UnknownModelError, match="gpt-4o"):
        strict.resolve("gpt-4o")
    assert strict.resolve(None).pools == ("one", "two")


def test_an_alias_is_replaced_and_remembered():
    resolution = catalog(aliases=resolve_aliases({"best": "big", "big": "qwen"})).resolve("best")
    assert (resolution.model, resolution.pools, resolution.alias) == ("qwen", ("two",), "best")
    assert catalog().resolve("qwen").alias is None


@pytest.mark.parametrize("aliases", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}])
def test_aliases_in_a_circle_are_refused(aliases):
    with pytest.raises(AliasError, match="go round in a circle: ") as caught:
        resolve_aliases(aliases)
    assert caught.value.alias in aliases


def test_while_no_base_model_is_known_every_name_is_one():
    models = ModelCatalog({"default": []})
    assert models.adapter("default", "anything") is None
    models.on_models("a:1", "default", ["tiny"], [])
    assert models.adapter("default", "anything") == "anything"
    assert models.adapter("default", "") is None
