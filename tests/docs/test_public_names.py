"""Every public module of `core` says what it offers, and everything that it offers is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from pathlib import Path

import pytest
from markdown_blocks import REPO_ROOT

import core

CORE = REPO_ROOT / "core"


def public_modules() -> list[str]:
    """Dotted names of every module of core without a leading underscore, empty packages left out."""
    paths = [path for path in CORE.rglob("*.py") if path.read_text(encoding="utf-8").strip()]
    names = [".".join(path.relative_to(REPO_ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if not any(part.startswith("_") for part in name.split(".")))


def source_of(name: str) -> Path:
    path = REPO_ROOT / Path(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def assigned(tree: ast.Module) -> dict[str, bool]:
    """Names that the module assigns, and whether a string that describes them follows."""
    found: dict[str, bool] = {}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        described = isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str)
        found |= {target.id: described for target in targets if isinstance(target, ast.Name)}
    return found


def undocumented(name: str) -> list[str]:
    """Public names of the module, and public methods of its classes, without a word on them."""
    module = importlib.import_module(name)
    constants = assigned(ast.parse(source_of(name).read_text(encoding="utf-8")))
    found: list[str] = []
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or isinstance(value, types.FunctionType):
            own = value.__module__.startswith("core.")
            found += [public] if own and not _described(value) else []
            found += [f"{public}.{method}" for method in _bare_methods(value)] if inspect.isclass(value) and own else []
        elif public in constants and not constants[public]:
            found.append(public)
    return found


def _described(value: object) -> bool:
    text = value.__doc__ or ""
    return bool(text.strip()) and not text.startswith(f"{getattr(value, '__name__', '')}(")


def _bare_methods(kind: type) -> list[str]:
    """Public methods and properties that the class itself defines and neither it nor a base describes."""
    members = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    wanted = (types.FunctionType, property, classmethod, staticmethod)
    return [
        name for name, value in members.items() if isinstance(value, wanted) and not inspect.getdoc(getattr(kind, name))
    ]


def test_the_modules_are_found() -> None:
    names = public_modules()
    assert len(names) > 60
    assert {"core", "core.backend.base", "core.sched.scheduler", "core.serve.routes"} <= set(names)


@pytest.mark.parametrize("name", public_modules())
def test_all_lists_names_that_exist(name: str) -> None:
    module = importlib.import_module(name)
    if not assigned(ast.parse(source_of(name).read_text(encoding="utf-8"))) and not _definitions(name):
        return  # a package that holds a docstring alone
    assert hasattr(module, "__all__"), "it has no __all__"
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert not missing


def _definitions(name: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    tree = ast.parse(source_of(name).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, kinds)]


@pytest.mark.parametrize("name", public_modules())
def test_every_public_name_is_documented(name: str) -> None:
    if hasattr(importlib.import_module(name), "__all__"):
        assert undocumented(name) == []


@pytest.mark.parametrize("name", public_modules())
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


def test_the_front_door() -> None:
    assert {"LLM", "SamplingParams"} <= set(core.__all__)
