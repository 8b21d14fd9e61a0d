"""Every error that Legato raises on purpose.

::

    LegatoError (exit code 1)
      UsageError (2)                             the command line
      ConfigError, ValueError (2)                keys, values, combinations: all at once
      ResumeError, ValueError (2)                a change that a resumed run can't follow
      DataError, ValueError                      a file, a row, a template
      ModelError, ValueError                     a model folder
        ModelNotFoundError, FileNotFoundError    nothing there, or no weights
        UnsupportedModelError                    its file keys aren't the model's
      FolderFormatError, ValueError              a header, index or manifest not to be trusted
      CheckpointError
        CheckpointNotFoundError, FileNotFoundError
        CheckpointExistsError, FileExistsError   steps of another branch are in the way
        CheckpointMismatchError, ValueError      keys, shapes or dtypes aren't the model's
        CheckpointTornError                      no valid manifest, or missing bytes
        CheckpointWriteError, OSError (3)        a save failed
        OutputDirLockedError                     another run is using this output_dir
        RankDisagreementError                    ranks passed different steps or layouts
      WorldError, RuntimeError                   processes can't meet, or don't fit together
        PeerLostError                            another process of the run has gone
        RunFailedError                           a launched run failed: which rank did first
      CompileError, RuntimeError                 no compiler, or too many forms of batches
      NonFiniteError, ArithmeticError            a loss or a gradient that isn't finite
      MissingDependencyError, ImportError        an optional package isn't installed
    StopRequested (129, 130 or 143)              not a LegatoError: a signal asked for it

A message says where, what was expected, what was found, and what to do; the facts are attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LegatoError(Exception):
    """Base of every error that Legato raises on purpose; ``exit_code`` ends the command."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message


class UsageError(LegatoError):
    """The command line asks for something that doesn't exist or doesn't fit."""

    exit_code = 2


class ConfigError(LegatoError, ValueError):
    """One or more things in a config are wrong; ``.problems`` lists each as text."""

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(LegatoError, ValueError):
    """A data file, a row or a chat template is unusable; ``.path`` and ``.row`` tell which."""


class ModelError(LegatoError, ValueError):
    """A model folder is unusable; ``.path`` tells which."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no model at the given place, or the folder holds no weights."""


class UnsupportedModelError(ModelError):
    """A model family that Legato can't train yet, named."""


class FolderFormatError(LegatoError, ValueError):
    """A safetensors header, an index or a manifest is broken or hostile; ``.path`` tells which."""


class CheckpointError(LegatoError):
    """Base of the errors about checkpoints."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint that was asked for isn't there; ``.path``."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Steps of another branch are in the way; ``.steps``, ``.path``."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """Keys, shapes or dtypes in a checkpoint aren't what the run needs; ``.path``, ``.key``."""


class CheckpointTornError(CheckpointError):
    """The folder has no valid manifest, or bytes are missing; ``.path``."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint couldn't be written; ``.step``, ``.path``; the cause is chained."""

    exit_code = 3


class OutputDirLockedError(CheckpointError):
    """Another run holds the lock of this output_dir; ``.path``, ``.holder``."""


class RankDisagreementError(CheckpointError):
    """Ranks passed different steps or layouts; ``.values`` maps rank to value."""


class WorldError(LegatoError, RuntimeError):
    """The processes of a run can't meet, differ where they mustn't, or one of them failed."""


class PeerLostError(WorldError):
    """Another process of the run failed, ended or doesn't answer; its own log says why."""


class RunFailedError(WorldError):
    """A launched run failed; ``.rank`` failed first, ``.exit_code`` is what its error asks for.

    ``.rank`` is None where it is one of another host and isn't known.
    """


class ResumeError(LegatoError, ValueError):
    """The config changed in a field that a resumed run can't change; ``.changes``."""

    exit_code = 2


class CompileError(LegatoError, RuntimeError):
    """torch.compile can't compile here, or met more forms of input than it may; ``.guard``."""


class NonFiniteError(LegatoError, ArithmeticError):
    """A loss or a gradient norm isn't finite; ``.step``, ``.sample_ids``.

    ``.weights_changed``: an update was made before that was known.
    """

    weights_changed = False


class MissingDependencyError(LegatoError, ImportError):
    """An optional package is needed and isn't installed; the message holds the install command."""

    @classmethod
    def of_torchao(cls, key: str, error: ImportError) -> MissingDependencyError:
        """What a missing or too old torchao means to the config.

        Args:
            key: The config's key and value that need it.
            error: What importing it raised.

        Returns:
            The error, with the version that is there.
        """
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = f"torchao {version('torchao')} doesn't have it ({error})"
        except PackageNotFoundError:
            found = "torchao isn't installed"
        return cls(f'{key} needs torchao 0.18 or newer; {found}: pip install "legato[quant]"')


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind: torch appends C++ stacks, others nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class StopRequested(BaseException):
    """A signal asked the run to stop; raised after the checkpoint is on disk.

    A BaseException, so that no ``except Exception`` on the way up turns a stop into a failure.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
