"""Scores that other programs measured: lm-eval, evalscope and inspect-ai, from their result files.

They run in environments of their own. What counts here is the number, how sure it is, the
parameters it was measured with, and the published number that it stands beside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, HttpUrl

from pipeline.core.errors import ScoresInvalid
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Count, Digest, Frozen, Line, sha256_of
from pipeline.core.verdict import RunVerdict, worst
from pipeline.serving.quality.estimate import Estimate, wilson
from pipeline.serving.smoke.model import Share

_MOST_BYTES = 256 << 20  # inspect-ai writes every sample into its log
_Z = 1.959963984540054
_MOST_SCORES, _MOST_TEXT = 1000, 300


class PublishedScore(Frozen):
    """A vendor's number for a task, and how far below it a sound server may be."""

    value: Share
    tolerance: Share
    source: HttpUrl


class Score(Frozen):
    """One metric of one task."""

    task: Line
    metric: Line
    samples: Count | None
    estimate: Estimate
    verdict: RunVerdict = "unknown"


class ImportedScores(Frozen):
    """All scores of a file."""

    program: Literal["lm-eval", "evalscope", "inspect-ai"]
    file: str
    digest: Digest
    model: str
    parameters: dict[str, str]  # as the program wrote them
    scores: Annotated[list[Score], Field(min_length=1)]
    published: PublishedScore | None = None

    @property
    def verdict(self) -> RunVerdict:
        """The worst of all; unknown without a published number."""
        return worst([score.verdict for score in self.scores], "unknown")


def read_scores(
    path: Path, published: PublishedScore | None = None, metric: str | None = None
) -> ImportedScores:
    """Reads the scores in any program's file; `metric` chooses one of several."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ScoresInvalid(f"{path}: is larger than {_MOST_BYTES} bytes")
        data = path.read_bytes()
        value = read_json(data, most_bytes=_MOST_BYTES, any_int=True, no_number_is_null=True)
        program, model, parameters, rows = _read(value if isinstance(value, dict) else {})
    except (OSError, JsonInvalid) as error:
        raise ScoresInvalid(f"{path}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ScoresInvalid(f"{path}: is no result of lm-eval, evalscope or inspect-ai") from error
    scores = []
    for task, name, number, error_of, samples in rows[:_MOST_SCORES]:
        # shares alone can stand beside a published share
        is_known = isinstance(number, int | float) and 0 <= number <= 1
        if not is_known or (metric and metric != name):
            continue
        if isinstance(error_of, int | float) and error_of > 0:
            half = _Z * float(error_of)
            low, high, method = max(0.0, number - half), min(1.0, number + half), "its own error"
        else:
            share = wilson(number * (samples or 0), samples or 0)
            low, high, method = share.low, share.high, share.method
        estimate = Estimate(value=number, low=low, high=high, n=samples or 0, method=method)
        verdict: RunVerdict = "unknown"
        if published:
            verdict = estimate.at_least(published.value - published.tolerance)
        scores.append(
            Score(task=task, metric=name, samples=samples, estimate=estimate, verdict=verdict)
        )
    if not scores:
        raise ScoresInvalid(f"{path}: holds no share{f' named {metric}' if metric else ''}")
    return ImportedScores(
        program=program,
        file=path.name,
        digest=sha256_of(data),
        model=model[:_MOST_TEXT],
        parameters={str(k)[:80]: str(v)[:_MOST_TEXT] for k, v in parameters.items()},
        scores=scores,
        published=published,
    )


_Program = Literal["lm-eval", "evalscope", "inspect-ai"]
# of a score: task, metric, value, its error, samples
_Row = tuple[str, str, Any, Any, int | None]


def _read(value: dict[str, Any]) -> tuple[_Program, str, dict[str, Any], list[_Row]]:
    """Reads the program, the model, its parameters and the scores, by the form of the file."""
    rows: list[_Row] = []
    if "eval" in value and "results" in value:
        # inspect-ai: https://inspect.aisi.org.uk/eval-logs.html
        about, results = value["eval"], value["results"]
        if value.get("status") != "success":
            raise ScoresInvalid(f"the evaluation ended with {str(value.get('status'))[:40]!r}")
        for each in results["scores"]:
            metrics = each["metrics"]
            error = (metrics.get("stderr") or {}).get("value")
            rows += [
                (str(about["task"]), f"{each['name']} {name}", metric["value"], error,
                 results.get("total_samples"))
                for name, metric in metrics.items()
                if name != "stderr"
            ]  # fmt: skip
        parameters = about.get("model_generate_config") or {}
        return "inspect-ai", str(about.get("model")), parameters, rows
    if "results" in value and "configs" in value:
        # lm-eval: `metric,filter` beside `metric_stderr,filter`
        counts = value.get("n-samples") or {}
        for task, given in value["results"].items():
            number = (counts.get(task) or {}).get("effective")
            for name, each in given.items():
                metric, _, choice = name.partition(",")
                if choice and not metric.endswith("_stderr"):
                    error = given.get(f"{metric}_stderr,{choice}")
                    rows.append((task, f"{metric} {choice}", each, error, number))
        config = value.get("config") or {}
        chosen = {k: config.get(k) for k in ("model_args", "gen_kwargs", "num_fewshot", "limit")}
        return "lm-eval", str(value.get("model_name") or config.get("model")), chosen, rows
    # evalscope: one report for each dataset
    for metric in value["metrics"]:
        rows.append(
            (str(value["dataset_name"]), str(metric["name"]), metric["score"], None,
             metric.get("num"))
        )  # fmt: skip
    return "evalscope", str(value["model_name"]), {}, rows
