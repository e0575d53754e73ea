"""Kubernetes manifests: built as kubectl builds them, and held against schemas."""

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Document = dict[str, Any]
KUBERNETES = "1.33"
_SCALARS = {"string": {"type": "string"}, "integer": {"type": "integer"}, "boolean": {"type": "boolean"}}
_SCALARS |= {"map": {"type": "object"}, "any": {}}


def build(folder: Path) -> list[Document]:
    """`kubectl kustomize`, or skip with the reason."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl builds the manifests: run `.ci/install-kubectl.sh DIR` and put DIR on the PATH")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def check(document: Document) -> None:
    """Against the schema of its kind; fields that it does not know are mistakes.

    Raises:
        AssertionError: naming the object, the field and what is wrong with it.
    """
    where = f"{document['kind']} {document['metadata']['name']}"
    own = _schemas().get(f"{document['apiVersion']} {document['kind']}")
    if own is not None:
        for error in jsonschema.Draft202012Validator(own).iter_errors(document):
            raise AssertionError(f"{where}: {'.'.join(map(str, error.absolute_path))}: {error.message}")
        return
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        raise AssertionError(f"{where}: {error}") from error


@cache
def _schemas() -> dict[str, Document]:
    text = Path(__file__).with_suffix("").with_name("manifest_schemas.yaml").read_text()
    return {
        kind: {
            "type": "object",
            "additionalProperties": False,
            "required": ["spec"],
            "properties": {"apiVersion": {}, "kind": {}, "metadata": {}, "spec": _schema(spec)},
        }
        for kind, spec in yaml.safe_load(text).items()
    }


def _schema(short: Any) -> Document:
    if isinstance(short, list):
        (item,) = short
        return {"type": "array", "items": _schema(item)}
    if isinstance(short, Mapping):
        fields = {name.removesuffix("!"): _schema(value) for name, value in short.items()}
        required = [name.removesuffix("!") for name in short if name.endswith("!")]
        return {
            "type": "object",
            "additionalProperties": False,
            "required": required,
            "properties": fields,
        }
    return dict(_SCALARS[short]) if short in _SCALARS else {"enum": short.split("|")}
