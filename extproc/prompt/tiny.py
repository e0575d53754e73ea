"""Where the tiny model that travels with the package is."""

from importlib.resources import files
from pathlib import Path

from extproc.core.errors import WarmrouteError


def tiny_model_path() -> Path:
    """Directory with `tokenizer.json`, `tokenizer_config.json`, `config.json` and `generation_config.json`.

    Raises:
        WarmrouteError: the package was installed inside an archive, so there is no directory to name.
    """
    path = files("extproc.data") / "tiny_model"
    if not isinstance(path, Path):
        raise WarmrouteError(
            "the tiny model is not on a file system; install warmroute as files, not as a zip archive"
        )
    return path
