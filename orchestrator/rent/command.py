"""`orchestrator rent`: find, price, start, list and stop machines that serve a run as inference nodes.

Nothing is started before the table of offers was shown and agreed to (`--yes` agrees). `--dry-run` makes no call.
With a budget the command stays in the foreground. Its limits and the end of the run end the machines, and so do an
error, Ctrl-C, SIGQUIT, SIGTERM and a closed terminal. A kill -9 does not.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

from composer_prime.console import pluralize
from composer_prime.errors import ConfigError, InviteError, ProviderError, ProviderLoginError
from composer_prime.run.keys import RunKeys
from composer_prime.run.node_registry import utc_text
from composer_prime.run.rentals import Rental, RentalRecord
from composer_prime.run.run_dir import RunDir, read_run_id
from composer_prime.wire.enrollment import INVITE_VARIABLE, Invite, release_package
from orchestrator.rent.cli_providers import Prime, Vast
from orchestrator.rent.http_providers import Lambda, RunPod
from orchestrator.rent.machines import STOP_TIMEOUT_S, RentalBudget, RentedMachines, find
from orchestrator.rent.provider import Instance, Needs, Offer, Order, Provider, choose
from orchestrator.rent.usefulness import KEPT_S, RunUse

PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in (Vast(), RunPod(), Lambda(), Prime())}
_EXAMPLE_LABEL = "composer-RUN-01234567"
_INVITE = "INVITE_STRING"
_INVITE_S = 24 * 3600.0
"""A machine may take this long to join; a node that has joined no longer needs the invite."""


def main(words: list[str], providers: Mapping[str, Provider] | None = None) -> int:
    """Return the exit status. Raises ConfigError for a wrong command line and ProviderError for what went wrong."""
    providers = providers or PROVIDERS
    options = _parser(sorted(providers)).parse_args(words)
    if options.run is None:
        options.run = _only_live_run()
    record = RentalRecord(options.run)
    if options.status or options.stop is not None:
        if not record.path.exists():
            read_run_id(RunDir(options.run))  # a mistyped folder is an error
        labels = options.stop or []
        _check_labels(labels, record)
        names = {rental.provider for rental in record.rentals() if not labels or rental.label in labels}
        by_provider = [RentedMachines(providers[name], record, _tell, only=labels) for name in sorted(names)]
        return _status(by_provider, record) if options.status else _stop(by_provider, record, dry_run=options.dry_run)
    run_id = read_run_id(RunDir(options.run))
    provider = providers[_required(options.provider, "--provider")]
    count, needs = _required(options.count, "--count"), _needs(options)
    if provider.needs_ssh_key and not options.ssh_key:
        raise ConfigError(f"machines of {provider.name} need --ssh-key: {provider.needs_ssh_key}")
    options.package = options.package or release_package("vllm") or ""
    if not options.package and not options.image:
        raise ConfigError(
            "--package is missing, and composer-prime is installed here from a folder or file that other machines do "
            "not have: give --package SPEC, what uv installs there, such as 'composer-prime[vllm] @ git+https://...', "
            "or --image with an image that contains it"
        )
    if options.dry_run:
        _dry_run(provider, options, needs, count)
        return 0
    return _rent(RentedMachines(provider, record, _tell), options, needs, count, run_id)


def _only_live_run() -> Path:
    from orchestrator.fleet.commands import live_run

    return live_run(None).run_dir.root


def _check_labels(labels: list[str], record: RentalRecord) -> None:
    """Raise ConfigError for a label that was not rented."""
    known = {rental.label: rental.open for rental in record.rentals()}
    for label in labels:
        if label not in known:
            names = ", ".join(name for name, is_open in known.items() if is_open) or "none"
            raise ConfigError(f"{record.path} has no machine {label!r}; those that may be billed: {names}")


def _rent(rented: RentedMachines, options: argparse.Namespace, needs: Needs, count: int, run_id: str) -> int:
    from orchestrator.rent.calls import answer_to

    provider = rented.provider
    budget = RentalBudget(hours=options.max_hours, dollars=options.max_dollars)
    invite_of = _invite_source(options, run_id)
    _refresh(rented)
    if (reason := budget.spent(rented.rentals(), time.time())) is not None:
        raise ConfigError(
            f"the budget of this run's machines of {provider.name} is spent already: {reason}. Raise it, or end what "
            f"is still open: {_stop_line(options.run)}"
        )
    offers = provider.read_offers(answer_to(provider.offers_call(needs)), needs)
    machines = choose(offers, needs, count)
    _tell(_table(machines[:count]))
    rate = sum(offer.usd_per_hour for offer in machines[:count])
    _tell(f"{pluralize(count, 'machine')} of {provider.name}: ${rate:.2f} an hour, ${rate * 24:.2f} a day")
    if not options.yes:
        _ask()
    invite = invite_of()
    end_at = _end_at(budget, rented, rate)

    def start() -> int:
        def order_of(label: str, offer: Offer) -> Order:
            return _order(options, label, offer, invite=invite, end_at=end_at)

        started = rented.start(machines, count, run_id, order_of, budget)
        if started < count:
            _tell(f"{started} of {count} machines were started. They cost money until: {_stop_line(options.run)}")
        return started

    if budget.hours is None and budget.dollars is None:
        with _interrupted_by_signals():
            try:
                started = start()
                if started:
                    _tell(f"nothing ends these machines by itself: {_stop_line(options.run)}")
            except BaseException:
                _tell(f"what was started costs money until: {_stop_line(options.run)}")
                raise
        return int(started < count)

    def watch() -> int:
        started = start()
        if started:
            _tell(_limits_text(provider, budget))
            _tell(f"stopping the machines: {rented.watch(budget, RunUse(options.run))}")
        return started

    return int(_then_stop(rented, options.run, watch) < count)


def _refresh(rented: RentedMachines) -> None:
    """Note which machines ended by themselves. What cannot be listed now counts as billed."""
    if any(rental.open for rental in rented.rentals()):
        try:
            rented.refresh()
        except ProviderLoginError:
            raise
        except ProviderError as error:
            _tell(f"earlier machines count as billed, because they cannot be listed now: {error}")


def _invite_source(options: argparse.Namespace, run_id: str) -> Callable[[], str]:
    """Return what gives the invite string; it is made only once the machines are agreed to.

    Raises InviteError at once for a given one that does not admit the machines' nodes, and ConfigError where machines
    elsewhere could not reach the run.
    """
    run_dir = RunDir(options.run.absolute())
    nodes = options.count * options.gpus
    given = options.invite or os.environ.get(INVITE_VARIABLE)
    if given:
        _check_invite(Invite.read(given), run_dir, run_id, nodes)
        return lambda: given
    from orchestrator.invite import create_invite, node_addresses

    addresses = node_addresses(run_dir, options.address)
    return lambda: create_invite(
        run_dir, nodes=nodes, expires_s=_INVITE_S, addresses=addresses, package=options.package
    ).text()


def _check_invite(invite: Invite, run_dir: RunDir, run_id: str, nodes: int) -> None:
    """Raise InviteError unless `nodes` machines of this run can join with the invite."""
    remedy = f"leave out --invite and ${INVITE_VARIABLE}, and one is made, or use `orchestrator invite {run_dir.root}`"
    if invite.run_id != run_id:
        raise InviteError(f"the invite is of run {invite.run_id}, {run_dir.root} is run {run_id}: {remedy}")
    if invite.expires <= time.time():
        raise InviteError(f"the invite expired at {utc_text(invite.expires)}, it is {utc_text(time.time())}: {remedy}")
    registry = RunKeys(run_dir.keys).registry
    if not registry.path.exists():  # the gateway runs elsewhere
        return
    left = registry.uses_left(invite.keys.own.public)
    if left is None:
        raise InviteError(f"the run {run_id} has no such invite: {remedy}")
    if left < nodes:
        raise InviteError(f"the invite admits {left} more nodes, the machines have {nodes} GPUs, one a node: {remedy}")


def _limits_text(provider: Provider, budget: RentalBudget) -> str:
    limits = [f"{budget.hours:g} hours"] if budget.hours is not None else []
    limits += [f"${budget.dollars:.2f}"] if budget.dollars is not None else []
    text = (f"this command ends the machines after {' or '.join(limits)}, {KEPT_S / 60:g} minutes after the run, or "
            "when it is ended. It must stay running")  # fmt: skip
    if provider.ends_by_itself:
        return f"{text}; {provider.name} itself ends them some minutes later if it does not"
    return f"{text}: after kill -9 or a power cut nothing ends them"


def _end_at(budget: RentalBudget, rented: RentedMachines, rate: float) -> datetime | None:
    """Return when the provider itself should end new machines of `rate` dollars an hour.

    That is some time after this command should have done it.
    """
    spent = sum(rental.usd(time.time()) for rental in rented.rentals())
    rate += sum(rental.usd_per_hour for rental in rented.rentals() if rental.open)
    hours = [budget.hours] if budget.hours is not None else []
    hours += [(budget.dollars - spent) / rate] if budget.dollars is not None and rate else []
    if not hours:
        return None
    return datetime.now(UTC) + timedelta(hours=min(hours), seconds=2 * STOP_TIMEOUT_S)


@contextmanager
def _interrupted_by_signals() -> Iterator[Callable[[], None]]:
    """Make KeyboardInterrupt of the first signal that would end the command, and ignore the later ones.

    Yields what ignores them all from then on.
    """
    # What the starter ignores stays ignored: nohup ignores SIGHUP.
    numbers = [number for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
               if signal.getsignal(number) is not signal.SIG_IGN]  # fmt: skip

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield ignore
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


def _then_stop(rented: RentedMachines, run_dir: Path, work: Callable[[], int]) -> int:
    """Return what `work` does, and stop the machines, whatever ends it: also a signal or a closed terminal."""
    with _interrupted_by_signals() as ignore:
        try:
            return work()
        finally:
            try:
                ignore()
            finally:  # also when a signal comes in between
                _tell(f"ending the billing; signals do not end this. Should it be killed: {_stop_line(run_dir)}")
                rented.stop()


def _status(by_provider: list[RentedMachines], record: RentalRecord) -> int:
    listed: dict[str, list[Instance]] = {}
    troubles = []
    for rented in by_provider:
        try:
            listed[rented.provider.name] = rented.refresh()
        except (ProviderError, OSError) as error:  # the other providers' machines are shown
            troubles.append(str(error))
    now, rentals = time.time(), record.rentals()
    if not rentals:
        _tell(f"no machine was rented for this run ({record.path} is not there)")
    rate, count = 0.0, sum(map(len, listed.values()))
    for rental in rentals:
        instances = listed.get(rental.provider)
        instance = find(rental, instances or [])
        unknown = instances is None and rental.open
        count += unknown
        rate += rental.usd_per_hour if unknown or instance is not None else 0.0
        state = instance.state if instance else _unlisted(rental, known=instances is not None)
        end = f"{(rental.ended_at or now) - rental.asked_at:,.0f} s, at most ${rental.usd(now):.2f}"
        _tell(f"{rental.label}  {rental.provider} {rental.instance_id or '-'}  {rental.gpu}  "
              f"${rental.usd_per_hour:.2f}/h  {end}  {state}")  # fmt: skip
    total = sum(rental.usd(now) for rental in rentals)
    _tell(f"billed now: {pluralize(count, 'machine')}, ${rate:.2f} an hour; at most ${total:.2f} in all")
    if troubles:
        raise ProviderError("; ".join(troubles))
    return 0


def _unlisted(rental: Rental, *, known: bool) -> str:
    """Return the state of a machine that the provider does not list, or whose list is not known."""
    if rental.failed:
        return "start failed"
    if not rental.open:
        return "not listed: no longer billed"
    if not known:
        return "not known now: counts as billed"
    return "not listed yet" if rental.instance_id else "not listed; its start got no answer: --stop looks for it"


def _stop(by_provider: list[RentedMachines], record: RentalRecord, *, dry_run: bool) -> int:
    troubles = []
    for rented in by_provider:
        if dry_run:
            for rental in rented.rentals():
                if rental.open:
                    _tell(rented.provider.stop_call(rental.instance_id or "INSTANCE_ID").text())
            _tell(rented.provider.list_call().text())
            continue
        try:
            rented.stop()
        except (ProviderError, OSError) as error:  # the other providers' machines are stopped first
            troubles.append(str(error))
    if not by_provider:
        _tell(f"no machine was rented for this run ({record.path} is not there)")
    if troubles:
        raise ProviderError("; ".join(troubles))
    return 0


def _dry_run(provider: Provider, options: argparse.Namespace, needs: Needs, count: int) -> None:
    offer = Offer(offer_id="OFFER_ID", gpu=needs.gpu or "GPU", gpus=needs.gpus, gpu_memory_gb=None, disk_gb=None,
                  usd_per_hour=needs.max_price)  # fmt: skip
    order = _order(options, _EXAMPLE_LABEL, offer, invite=_INVITE, end_at=None)
    address = provider.address_call("INSTANCE_ID")
    setup = provider.setup_call('{"status": "ACTIVE", "ssh": "USER@HOST -p 22"}', order)
    lines = [
        "no call is made. In the order in which they would be:",
        "offers   " + provider.offers_call(needs).text(),
        f"start    {count} x " + provider.start_call(offer, order).text(),
        *(["address  " + address.text()] if address else []),
        *(["set up   " + setup.text()] if setup else []),
        "list     " + provider.list_call().text(),
        "stop     " + provider.stop_call("INSTANCE_ID").text(),
        f"at most ${needs.max_price * count:.2f} an hour for {pluralize(count, 'machine')}",
        "each machine runs bootstrap.sh with:",
        *(f"  {line}" for line in order.script.splitlines() if line.startswith("export ")),
    ]
    _tell("\n".join(lines))


def _order(options: argparse.Namespace, label: str, offer: Offer, *, invite: str, end_at: datetime | None) -> Order:
    values = {
        "COMPOSER_INVITE": invite,
        "COMPOSER_PACKAGE": options.package,
        "COMPOSER_NODE_NAME": label,
        "COMPOSER_USD_PER_HOUR": f"{offer.usd_per_hour / offer.gpus:g}",  # of one GPU, as --price takes it
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    bootstrap = Path(__file__).with_name("bootstrap.sh").read_text()
    return Order(
        label=label,
        script=f"#!/usr/bin/env bash\n{exports}{bootstrap}",
        disk_gb=options.disk,
        image=options.image,
        ssh_key=options.ssh_key,
        known_hosts=options.run.absolute() / "rentals.known_hosts",
        end_at=end_at,
    )


def _table(offers: list[Offer]) -> str:
    rows = [("$/h", "GPUs", "GB each", "disk GB", "reliability", "place")]
    for offer in offers:
        rows.append(
            (
                f"{offer.usd_per_hour:.2f}",
                f"{offer.gpus} x {offer.gpu}",
                "-" if offer.gpu_memory_gb is None else f"{offer.gpu_memory_gb:.0f}",
                "-" if offer.disk_gb is None else f"{offer.disk_gb:.0f}",
                "-" if offer.reliability is None else f"{offer.reliability:.3f}",
                offer.place,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip


def _ask() -> None:
    """Return when the user agrees. Raises ConfigError without a terminal, or if the answer is no."""
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to confirm the cost at: pass --yes")
    if input("Rent them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was rented")


def _needs(options: argparse.Namespace) -> Needs:
    return Needs(
        gpu=options.gpu,
        gpus=options.gpus,
        gpu_memory_gb=options.gpu_memory,
        disk_gb=options.disk,
        max_price=_required(options.max_price, "--max-price"),
        min_reliability=options.min_reliability,
    )


def _required(value, flag: str):
    if value is None:
        raise ConfigError(f"{flag} is missing: `orchestrator rent --help` has an example")
    return value


def _stop_line(run_dir: Path) -> str:
    return f"orchestrator rent --stop --run {shlex.quote(str(run_dir))}"


def _tell(text: str) -> None:
    """Print `text` where there is still somebody to read it: a closed terminal must not keep machines billed."""
    with suppress(OSError, ValueError):  # ValueError: a closed stream, or text that the terminal cannot show
        print(text, flush=True)


def _positive(text: str) -> float:
    """Read a number above 0. argparse shows the message of the ValueError's class: invalid _positive value."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of 1 or more")
    return int(text)


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator rent",
        allow_abbrev=False,
        description="Rent machines that join a run as inference nodes, list them, and end their billing.",
        epilog="orchestrator rent --provider vast --gpu H100 --count 8 --max-price 2.5 --run outputs/a1",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="the run's directory, which records what is rented; default: the only live run below outputs/",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="list this run's machines and their cost")
    action.add_argument(
        "--stop", nargs="*", metavar="LABEL", help="stop these machines, or all of the run; check that billing ended"
    )
    parser.add_argument("--dry-run", action="store_true", help="print every call and make none")
    parser.add_argument("--provider", choices=names)
    parser.add_argument("--count", type=_count, help="machines")
    parser.add_argument("--max-price", type=_positive, metavar="USD", help="maximum dollars per hour for one machine")
    parser.add_argument("--address", action="append", default=[], metavar="HOST:PORT",
                        help="address of the run for the machines; default: where it listens")  # fmt: skip
    parser.add_argument("--invite", metavar="STRING", help="an existing invite; default: a new one")
    parser.add_argument("--yes", action="store_true", help="rent without asking")
    needs = parser.add_argument_group("what a machine must have")
    needs.add_argument("--gpu", metavar="MODEL", help="such as H100 or 'RTX 4090'; default: any")
    needs.add_argument("--gpus", type=_count, default=1, metavar="N", help="GPUs of a machine; default: 1")
    needs.add_argument("--gpu-memory", type=_positive, default=0.0, metavar="GB", help="memory of one GPU")
    needs.add_argument("--disk", type=_count, default=100, metavar="GB", help="default: 100")
    needs.add_argument("--min-reliability", type=float, default=0.95, metavar="SHARE", help="Vast only; default: .95")
    start = parser.add_argument_group("how a machine starts")
    start.add_argument("--package", metavar="SPEC", help="package for uv to install; default: this release with vllm")
    start.add_argument("--image", help="container image (Vast, RunPod) or Prime's image name")
    start.add_argument(
        "--ssh-key", metavar="KEY", help="Lambda: name of a registered key; Prime: path of the private key"
    )
    budget = parser.add_argument_group(
        "budget: this command then stays in the foreground, and ends the machines with it"
    )
    budget.add_argument("--max-hours", type=_positive, metavar="H")
    budget.add_argument("--max-dollars", type=_positive, metavar="USD")
    return parser
