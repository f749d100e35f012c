"""The command line: `ds-flux COMMAND ...`, or `deepspeed --module ds_flux COMMAND ...`.

Each command imports what it needs and no more: consolidate starts without DeepSpeed and diffusers, checkpoint without torch.
"""

import os
import sys
import traceback

from ds_flux import UserError, __version__, chatter, travel


def train(argv: list[str]) -> int:
    """train a transformer, or a LoRA of it"""
    from ds_flux import checks, commands, config

    settings, command = config.load(argv, "ds-flux train", commands.TrainCommand)
    chatter.settle(settings.run.verbose)
    checks.check(settings)
    from ds_flux import dry_run, runtime, trainer  # slow to import: only once the flags are known to be right

    if command.dry_run:
        if runtime.env_rank() == 0:
            print(dry_run.dry_run(settings))
        return 0
    trainer.train(settings)
    runtime.shutdown()
    return 0


def plan(argv: list[str]) -> int:
    """what a run would take, in memory, network and disk, under every DeepSpeed config; no GPU, no weights"""
    from ds_flux import commands, config, flags

    settings, command = config.load(argv, "ds-flux plan", commands.PlanCommand)
    chatter.settle(settings.run.verbose)
    from ds_flux import plan_report

    print(plan_report.report(settings, command, next(iter(flags.values_of(argv, "--config")), None)))
    return 0


def tune(argv: list[str]) -> int:
    """search by measuring for the DeepSpeed config and the batch that make a run fast"""
    from ds_flux import checks, commands, config

    settings, command = config.load(argv, "ds-flux tune", commands.TuneCommand)
    chatter.settle(settings.run.verbose)
    checks.check(settings)
    from ds_flux import tune as module

    print(module.tune(settings, command))
    return 0


def consolidate(argv: list[str]) -> int:
    """turn a checkpoint into safetensors that diffusers and others load"""
    from ds_flux import consolidate as module

    return module.main(argv)


def checkpoint(argv: list[str]) -> int:
    """list, verify or prune the checkpoints of a run"""
    from ds_flux import keep

    return keep.main(argv)


def precompute(argv: list[str]) -> int:
    """encode the prompts and images of a training run, and end"""
    from ds_flux import checks, commands, config

    settings, _ = config.load(argv, "ds-flux precompute", commands.PrecomputeCommand)
    chatter.settle(settings.run.verbose)
    checks.check(settings)
    from ds_flux import precompute as module
    from ds_flux import runtime

    module.precompute(settings)
    runtime.shutdown()
    return 0


def sample(argv: list[str]) -> int:
    """make images from prompts"""
    from ds_flux import commands, config

    settings, command = config.load(argv, "ds-flux sample", commands.SampleCommand)
    chatter.settle(settings.run.verbose)
    from ds_flux import runtime, sampler

    sampler.sample(settings, command)
    runtime.shutdown()
    return 0


def evaluate(argv: list[str]) -> int:
    """validation loss, CLIP score and FID of a checkpoint, a transformer or a LoRA"""
    from ds_flux import commands, config

    settings, command = config.load(argv, "ds-flux evaluate", commands.EvaluateCommand)
    chatter.settle(settings.run.verbose)
    from ds_flux import evaluate as module
    from ds_flux import runtime

    module.evaluate(settings, command)
    runtime.shutdown()
    return 0


def doctor(argv: list[str]) -> int:
    """look whether the nodes of --hostfile, or this machine, can run a --config; with --data, at the run's data"""
    from ds_flux import checks, commands, config

    settings, command = config.load(argv, "ds-flux doctor", commands.DoctorCommand)
    chatter.settle(settings.run.verbose)
    if command.data:
        checks.check_data(settings.data)
    from ds_flux import doctor as module

    text, is_fine = module.report_of_data(settings) if command.data else module.report_of_nodes(settings, command)
    print(text)
    return 0 if is_fine else 2


def report(argv: list[str]) -> int:
    """one HTML page of a run: curves, samples, memory, settings"""
    from ds_flux import report as module

    return module.main(argv)


def demo(argv: list[str]) -> int:
    """write a small FLUX.1 and a data set of handwritten digits; score what a run made of them"""
    chatter.settle(is_verbose=False)
    from ds_flux import demo as module

    return module.main(argv)


COMMANDS = {
    command.__name__: command
    for command in (train, plan, tune, precompute, checkpoint, consolidate, sample, evaluate, report, doctor, demo)
}


def usage() -> str:
    """One line for each command."""
    lines = [f"  {name:12} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: ds-flux COMMAND [flags]      (ds-flux COMMAND --help lists the flags)", "", *lines])


def main() -> int:
    """Run one command; exit status 2 and one line for what the user can mend."""
    # the launcher adds --local_rank, and sets LOCAL_RANK as well
    argv = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    if argv and argv[0] == "--version":
        print(__version__)
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"ds-flux: error: unknown command {argv[0]}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        travel.adopt_mpi(os.environ)
        return COMMANDS[argv[0]](argv[1:])
    except UserError as error:
        return leave(error)


def leave(error: UserError) -> int:
    """Print the error once; ranks above 0 wait to be ended by the launcher, lest they end rank 0 before it has spoken."""
    if int(os.environ.get("RANK", 0)):
        import threading

        threading.Event().wait(20.0)
    print(f"ds-flux: error: {error}", file=sys.stderr, flush=True)
    return 2


def run() -> None:
    """The process's entry: `main`, and out at once.

    Everything is written and closed by now; what is left are libraries' threads (seen: one that aborted at the end of a run
    that had been stopped and saved, and turned its exit status into the launcher's failure).
    """
    try:
        status = main()
    except SystemExit as leaving:  # --help, --print_config
        status = leaving.code if isinstance(leaving.code, int) else 0
    except Exception as error:  # noqa: BLE001  (whatever it is, nobody shall wait for this process)
        status = 1
        tell(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tell(error: Exception) -> None:
    """What one rank alone has met: one line if it is understood, else all of it."""
    from ds_flux.failures import LoneError

    if isinstance(error, LoneError):
        print(f"ds-flux: error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)


if __name__ == "__main__":
    run()
