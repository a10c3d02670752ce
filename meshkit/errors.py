"""The errors a caller can meet. Each text says what was asked, what holds, and what to change."""


class MeshkitError(ValueError):
    """Base of every error meshkit raises for something the caller can change.

    exit_code: of a recipe that such an error ends: 2 where what it was given is wrong, 1 where the run failed.
    """

    exit_code = 2


class MeshError(MeshkitError):
    """A mesh that cannot be built on this world: sizes, axes, ranks."""


class PlanError(MeshkitError):
    """A plan that does not fit the model or the mesh: patterns, shapes, unsupported combinations."""


class ClusterError(MeshkitError):
    """A cluster that no machine could be, or that lacks a number which a forecast needs."""


class AgreementError(MeshkitError):
    """Ranks that must do the same with the same, and do not: another call, other choices, other rows."""


class CheckpointError(MeshkitError):
    """A checkpoint that is damaged, incomplete, or of another model."""


class DataError(MeshkitError):
    """Bad training data: unreadable files, empty corpora, ids outside the vocabulary."""


class StepError(MeshkitError):
    """An optimizer step that must not be taken: a loss or a gradient that is not finite."""

    exit_code = 1


class MeetingError(StepError):
    """A replica that cannot meet the others any more: no meeting place, no quorum, another layout.

    All its ranks have it, and its values are those after its last step, so that they can be saved.
    """


class CorruptionError(MeshkitError):
    """Weights or optimizer state that are not what was written: a bit flipped, or a rank computed wrongly.

    ranks: of the mesh, those that have it; of two copies that differ both.
    """

    exit_code = 1
    ranks: tuple[int, ...] = ()


class OffloadError(MeshkitError):
    """Activations that could not be moved or brought back: a full disk, a failing file, a tensor changed meanwhile."""

    exit_code = 1


class RewardError(MeshkitError):
    """Answers that could not be scored where that was not to be let pass, or a sandbox that the system cannot provide."""

    exit_code = 1


class CheckError(MeshkitError):
    """A run that `check` found to compute something other than one device would, or that it could not watch to the end."""

    exit_code = 1
