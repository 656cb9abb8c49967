"""A signal that asks a run to stop is answered after the step: saved, said, with an exit code, and continued exactly."""

import signal
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.checkpoint import step_folders
from counterpoint.errors import StoppedBySignal
from counterpoint.runtime.commit.step_commit import StepGuard, StepReport, decide_step, decode_report, encode_report
from counterpoint.training.fit_loop import SIGNAL_PERIOD_S, SignalExchange
from tests.training.trainers import ADAMW, StopAt, batch_norm_mlp, dataset, equal_bits, fit, mlp

PLANS = ["data(2)", "zero(2, level=3)", "pipeline(2)", "server(2)", "pipedream(2)"]
SAVED = signal.SIGTERM


class Raises(cp.Callback):
    """Sends this process a signal after a step, as a scheduler does."""

    def __init__(self, step, number=SAVED, times=1):
        self.step, self.number, self.times = step, number, times

    def on_step(self, event):
        if event.step == self.step:
            for _ in range(self.times):
                signal.raise_signal(self.number)


def stop(strategy="data(2)", number=SAVED, step=2, times=1, **fit_options):
    """Return the exit of a run of eight steps that gets a signal after one."""
    with pytest.raises(StoppedBySignal) as caught:
        fit(strategy, batch_norm_mlp(), epochs=2, callbacks=[Raises(step, number, times)], fit_options=fit_options)
    return caught.value


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_a_stopped_run_continues_bit_for_bit_and_loses_no_step(strategy, tmp_path):
    whole, _ = fit(strategy, batch_norm_mlp(), epochs=2, fit_options={"checkpoint_dir": tmp_path / "w"})
    stopped = stop(strategy, checkpoint_dir=tmp_path / "a", step=3, times=2)
    assert [path.name for path in step_folders(tmp_path / "a")] in (["step-00000004"], ["step-00000005"])
    saved = step_folders(tmp_path / "a")[0]
    assert str(stopped) == (
        f"stopped by SIGTERM after step {int(saved.name[5:])}; saved {saved}; the same call with resume='auto' "
        "continues from there"
    )
    rest, _ = fit(strategy, batch_norm_mlp(), epochs=2, fit_options={"resume": tmp_path / "a"})
    assert equal_bits(rest, whole)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["server(2, consistency=asp)", "easgd(2)", "pipedream(3)", "pipedream_2bw(2)"])
def test_asynchronous_plans_stop_in_mid_epoch_when_their_batches_in_flight_are_done(strategy, tmp_path):
    whole, _ = fit(strategy, epochs=2, fit_options={"checkpoint_dir": tmp_path / "w"})
    with pytest.raises(StoppedBySignal):
        fit(strategy, epochs=2, callbacks=[Raises(0)], fit_options={"checkpoint_dir": tmp_path / "a"})
    (saved,) = step_folders(tmp_path / "a")
    assert 1 <= int(saved.name[5:]) <= 4
    rest, history = fit(strategy, epochs=2, fit_options={"resume": tmp_path / "a"})
    assert len(history.losses) == 8 - int(saved.name[5:])
    assert rest.keys() == whole.keys()


def test_ranks_that_commit_alone_exchange_signals_soon_and_then_once_in_a_period():
    exchange = SignalExchange()
    steps: list[int] = []
    exchange.start(100)
    for step in range(101, 2000):
        if exchange.is_due(step):
            exchange.plan_next(step, 0.01 * (step - (steps or [100])[-1]))
            steps.append(step)
    assert steps[:5] == [101, 103, 107, 115, 131]
    assert max(after - before for before, after in pairwise(steps)) == SIGNAL_PERIOD_S / 0.01
    exchange.plan_next(2000, 100.0)
    assert exchange.is_due(2001)


@pytest.mark.long(quick=["15-143"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_the_exit_code_is_that_of_the_signal_and_default_actions_return(number, code):
    before = signal.getsignal(number)
    stopped = stop(number=number)
    assert stopped.code == code
    assert str(stopped).endswith("; nothing was saved, because no checkpoint_dir was given")
    assert signal.getsignal(number) == before == signal.SIG_DFL


def test_a_handler_of_the_users_own_stays_and_decides():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        _, history = fit("data(2)", callbacks=[Raises(1, signal.SIGUSR1)])
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(history.losses) == 4
    assert seen == [signal.SIGUSR1] * 2


def test_a_run_that_ends_otherwise_gives_the_signals_back_too():
    with pytest.raises(KeyboardInterrupt):
        fit("data(2)", callbacks=[StopAt(1)])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_DFL] * 2


def test_a_loop_of_ones_own_asks_whether_to_stop():
    model, batches = mlp(), torch.utils.data.DataLoader(dataset(), batch_size=12)
    taken = 0
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy="data(2)") as step:
        for batch in batches:
            step(batch)
            taken += 1
            if step.should_stop():
                break
            signal.raise_signal(signal.SIGTERM) if taken == 2 else None
    assert taken == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_commit_tells_all_members_of_a_signal_that_one_of_them_got():
    reports = [StepReport(1.0, 2, 2.0, 1), StepReport(1.0, 2, 2.0, 1, stop_signal=15)]
    told = [decode_report(encode_report(report)) for report in reports]
    assert told == reports
    assert decide_step(told, (0, 1), StepGuard()).stop_signal == 15
