"""What `sm120` does, as plain functions: a request comes in, a typed result goes out.

One module for each matter: `app.build`, `app.gate`, `app.registry`, `app.verify`, `app.serve`,
`app.smoke`, `app.quality`, `app.bench`, `app.report`, `app.weights`, `app.hosts`, `app.deploy` and
what they share. Nothing in this package knows click, prints to stdout or ends the process: progress
goes through core.log, and every failure is a PipelineError. It imports any package but the cli, and
only the cli imports it.

`from pipeline import app` loads a module only when it is used: `app.verify` does not wait for
the libraries of `app.build`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.app import audit as audit
    from pipeline.app import bench as bench
    from pipeline.app import bench_nodes as bench_nodes
    from pipeline.app import build as build
    from pipeline.app import bump as bump
    from pipeline.app import bundle as bundle
    from pipeline.app import catalogue as catalogue
    from pipeline.app import deliver as deliver
    from pipeline.app import deploy as deploy
    from pipeline.app import evidence as evidence
    from pipeline.app import fit as fit
    from pipeline.app import gate as gate
    from pipeline.app import host as host
    from pipeline.app import host_status as host_status
    from pipeline.app import hosts as hosts
    from pipeline.app import image_statements as image_statements
    from pipeline.app import images as images
    from pipeline.app import on_slurm as on_slurm
    from pipeline.app import pages as pages
    from pipeline.app import paste as paste
    from pipeline.app import quality as quality
    from pipeline.app import rebuilds as rebuilds
    from pipeline.app import recipes as recipes
    from pipeline.app import registry as registry
    from pipeline.app import report as report
    from pipeline.app import run_plan as run_plan
    from pipeline.app import serve as serve
    from pipeline.app import signing as signing
    from pipeline.app import smoke as smoke
    from pipeline.app import sources as sources
    from pipeline.app import specs as specs
    from pipeline.app import statements as statements
    from pipeline.app import store as store
    from pipeline.app import upstream as upstream
    from pipeline.app import verify as verify
    from pipeline.app import weights as weights
    from pipeline.app import weights_hub as weights_hub
    from pipeline.app import workspace as workspace


def __getattr__(name: str) -> ModuleType:
    """Load a module of this package on first use."""
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        # a missing library keeps its own error
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(name) from error
