"""How a run begins with a teacher: its weights are placed, and it is named and evaluated once."""

from ml_collections import ConfigDict

from vit_jax import data, errors_of, evals, interop
from vit_jax.distributed import Supervisor, check_equal
from vit_jax.monitoring import Category, MetricWriter, format_value
from vit_jax.program import Program
from vit_jax.training.teacher import Teacher
from vit_jax.training.workdir import Workdir
from vit_jax.tree import ArrayTree


def begin_teaching(
    teacher: Teacher | None,
    config: ConfigDict,
    program: Program,
    info: data.DataInfo,
    folder: Workdir,
    log: MetricWriter,
    supervisor: Supervisor,
) -> tuple[ArrayTree, ...]:
    """Returns what `Program.train_step` is given besides state and batch: the teacher's parameters, on the devices.

    The log says who the teacher is and, at a run's first start, how good by the run's own evaluations of a head.

    Args:
        teacher: of the run; None: there is none.
        config: of the run.
        program: of the run.
        info: the run's data.
        folder: the run's folder.
        log: of the run.
        supervisor: of the run.

    Raises:
        UserError: the hosts have different teachers; the devices have too little memory; or the teacher's classes are
            not those of the data.
    """
    if teacher is None or program.teacher is None:
        return ()
    check_equal(supervisor, {f"the {name} of the teacher": value for name, value in teacher.identity.items()})
    with errors_of(f"task.teacher={teacher.source}"):
        interop.check_class_order(teacher.model.class_names, info.class_names)
    params, line = teacher.place(program.teacher), teacher.describe()
    if folder.start == 0:
        with supervisor.phase("evaluating the teacher", Category.EVALUATING):
            evals.check_fits(config, program.teacher, program.eval_batch, params)
            evaluators = evals.make_head_evaluators(config, program.teacher, info.opened)
            metrics = evals.run_evaluators(evaluators, params, supervisor.count_step)
        line += "".join(f", {name} {format_value(name, value)}" for name, value in metrics.items())
    log.write_text(line)
    return (params,)
