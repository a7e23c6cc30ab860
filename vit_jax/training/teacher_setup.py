"""The start of a run with a teacher: its weights are placed on the devices, and it is logged and evaluated once."""

from ml_collections import ConfigDict

from vit_jax import data, errors_of, evals, interop
from vit_jax.distributed import Supervisor, check_equal
from vit_jax.monitoring import Category, MetricWriter, format_value
from vit_jax.program import Program
from vit_jax.training.teacher import Teacher
from vit_jax.training.workdir import Workdir
from vit_jax.tree import ArrayTree


def place_teacher(
    teacher: Teacher | None,
    config: ConfigDict,
    program: Program,
    info: data.DataInfo,
    workdir: Workdir,
    log: MetricWriter,
    supervisor: Supervisor,
) -> tuple[ArrayTree, ...]:
    """Returns the further arguments of `Program.train_step`: the teacher's parameters on the devices, or ().

    The log names the teacher. At the first start of a run, it also has the metrics of the teacher, from those of the
    run's evaluations that suit its task.

    Args:
        teacher: the teacher; None: there is none.
        config: the configuration of the run.
        program: the program of the run.
        info: the data of the run.
        workdir: the folder of the run.
        log: the log of the run.
        supervisor: the supervisor of the run.

    Raises:
        UserError: the hosts have different teachers, the devices have too little memory, or the classes of the teacher
            and of the data differ.
    """
    if teacher is None or program.teacher is None:
        return ()
    check_equal(supervisor, {f"the {name} of the teacher": value for name, value in teacher.identity.items()})
    with errors_of(f"task.teacher={teacher.source}"):
        interop.check_class_order(teacher.model.class_names, info.class_names)
    params, line = teacher.place(program.teacher), teacher.describe()
    if workdir.start == 0:
        with supervisor.phase("evaluating the teacher", Category.EVALUATING):
            evals.check_fits(config, program.teacher, program.eval_batch, params)
            evaluators = evals.make_head_evaluators(config, program.teacher, info.opened)
            metrics = evals.run_evaluators(evaluators, params, supervisor.count_step)
        line += "".join(f", {name} {format_value(name, value)}" for name, value in metrics.items())
    log.write_text(line)
    return (params,)
