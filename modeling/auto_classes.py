"""Registers the model families with transformers' Auto classes, without importing transformers.

The configurations are registered as soon as transformers' AutoConfig exists, whether transformers is
imported before or after this package. The models follow when the first configuration is made: an
Auto class needs one to choose a model, and by then no module is half imported.
"""

import importlib
import os
import sys
import warnings
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .utils.whole_file import write_file

PACKAGE = __name__.partition(".")[0]
AUTO_CONFIG = "transformers.models.auto.configuration_auto"
NEEDED = "transformers >= 5.17 (pip install 'transformers>=5.17,<6')"
FAMILIES = {"flash_rnn": "FlashRNN", "flash_mlstm": "FlashMLSTM", "flash_xlstm": "FlashXLSTM"}
HEADS = {  # the end of a class's name -> its Auto class, and the mapping of that Auto class
    "Model": ("AutoModel", "MODEL_MAPPING"),
    "ForCausalLM": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "ForSequenceClassification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    ),
    "ForTokenClassification": (
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    ),
}

LOADER = """\"\"\"Takes this model's classes from the installed flashcell.

Programs that do not import flashcell find them here, with trust_remote_code.
\"\"\"

from flashcell import (
{names}
)

__all__ = [
{quoted}
]
"""


class AfterAutoConfig(MetaPathFinder):
    """Calls register_configs after the module of AutoConfig was run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                register_configs()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Registers at once where transformers' AutoConfig is here, else when it is imported."""
    if not any(isinstance(finder, AfterAutoConfig) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterAutoConfig())
    if sys.modules.get(AUTO_CONFIG) is not None:
        register_configs()


def register_configs() -> None:
    """Registers our configurations with AutoConfig; only warns if transformers does not fit, because
    whoever imported transformers may want none of our models."""
    package = importlib.import_module(PACKAGE)
    try:
        configs = {kind: getattr(package, f"{family}Config") for kind, family in FAMILIES.items()}
    except ImportError as error:
        text = f"{PACKAGE}'s models are not registered with transformers: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    auto = importlib.import_module(AUTO_CONFIG).AutoConfig
    for model_type, config in configs.items():
        auto.register(model_type, config)


@cache
def register_models() -> None:
    """Registers every model, but where somebody else's is registered for a configuration of ours."""
    package, transformers = (
        importlib.import_module(PACKAGE),
        importlib.import_module("transformers"),
    )
    auto_module = importlib.import_module("transformers.models.auto.modeling_auto")
    for model_type, family in FAMILIES.items():
        # Trainer shifts the labels of its label smoothing for the models named there alone.
        names = auto_module.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        names.setdefault(model_type, f"{family}ForCausalLM")
        config = getattr(package, f"{family}Config")
        for head, (auto, mapping) in HEADS.items():
            if config not in getattr(transformers, mapping):
                getattr(transformers, auto).register(config, getattr(package, f"{family}{head}"))
            put_into_transformers(f"{family}{head}", getattr(package, f"{family}{head}"))


def put_into_transformers(name: str, model: type) -> None:
    """Makes a class an attribute of transformers: `transformers serve` takes a model's class from
    there, by its name, and from no Auto class."""
    # transformers imports itself a second time, so the command may hold another module than
    # sys.modules has.
    command = sys.modules.get("transformers.cli.serving.model_manager")
    for place in (sys.modules["transformers"], getattr(command, "transformers", None)):
        if place is not None and not hasattr(place, name):
            setattr(place, name, model)


def write_loader(config: Any, folder: str) -> None:
    """Writes flashcell_code.py, a module with the model's classes, and names them in auto_map.

    So programs that never import this package load the model where it is installed. What auto_map
    says about other code is kept if the code lies in the folder."""
    family = FAMILIES.get(config.model_type)
    if family is None or not type(config).__module__.startswith(f"{PACKAGE}."):  # a user's class
        return
    classes = {"AutoConfig": f"{family}Config"}
    classes |= {auto: f"{family}{head}" for head, (auto, _) in HEADS.items()}
    is_here = lambda name: os.path.isfile(os.path.join(folder, f"{str(name).partition('.')[0]}.py"))
    others = {auto: name for auto, name in config.auto_map.items() if is_here(name)}
    config.auto_map = {auto: f"flashcell_code.{name}" for auto, name in classes.items()} | others
    names = sorted(classes.values())
    lines = {"names": "    {},", "quoted": '    "{}",'}
    parts = {key: "\n".join(line.format(name) for name in names) for key, line in lines.items()}
    write_file(os.path.join(folder, "flashcell_code.py"), LOADER.format(**parts).encode())


def import_with_transformers(module: str, what: str) -> ModuleType:
    """Imports `module` of this package; without transformers an error says that `what` needs it."""
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("transformers", "huggingface_hub"):
            raise
        text = f"{PACKAGE}.{what} needs {NEEDED}: {error}"
        raise ImportError(text, name=error.name, path=error.path) from error
