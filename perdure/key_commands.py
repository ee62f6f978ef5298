"""`perdure keys`: make, list and revoke API keys, straight in the database of PERDURE_DATABASE_URL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from perdure.store.engine import Store

_T = TypeVar("_T")
keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)


@keys.command()
def create(
    user: Annotated[str, typer.Option("--user", metavar="U", help="Whose key: tasks belong to this user.")],
    scopes: Annotated[
        list[str] | None,
        typer.Option(
            "--scopes",
            metavar="S,S",
            help="Of tasks:read, tasks:write, callbacks:write, admin; all but admin when not given.",
        ),
    ] = None,
    act_as: Annotated[bool, typer.Option("--act-as", help="May submit for other users.")] = False,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="WHEN", help="In 90d, 12h, 30m or 45s; or a date or time (UTC)."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="A note, such as where it is used.")] = None,
) -> None:
    """Make a key and show it, this once."""
    from perdure.endings import fail
    from perdure.keys import DEFAULT_SCOPES, check_scopes, create_key, time_left

    try:
        chosen = check_scopes(" ".join(scopes or DEFAULT_SCOPES).replace(",", " ").split())
        left = None if expires is None else time_left(expires, datetime.now(UTC))
        row, token = _with_store(
            lambda store: create_key(store, user, chosen, act_as=act_as, expires_in=left, name=name)
        )
    except ValueError as error:
        fail(error)
    typer.echo(f"{row.key_id} for {row.user_id}, scopes {', '.join(sorted(row.scopes))}", err=True)
    typer.echo(token)  # alone on stdout: KEY=$(perdure keys create ...)


@keys.command("list")
def list_(
    user: Annotated[str | None, typer.Option("--user", metavar="U", help="One user's keys only.")] = None,
) -> None:
    """List keys, newest first. The secrets are not known any more."""
    from perdure.keys import list_keys

    rows = _with_store(lambda store: list_keys(store, user))
    for row in rows:
        state = "live" if row.live else "revoked" if row.revoked_at else "expired"
        scopes = ",".join(sorted(row.scopes)) + (",act-as" if row.act_as else "")
        used = _day(row.last_used_at) or "never used"
        typer.echo(
            f"{row.key_id}  {state:<7}  {row.user_id:<20}  {scopes}  made {_day(row.created_at)}  {used}"
            + (f"  {row.name}" if row.name else "")
        )
    if not rows:
        typer.echo("no keys", err=True)


@keys.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="KEY_ID")]) -> None:
    """Revoke a key for good."""
    from perdure.endings import fail
    from perdure.keys import revoke_key

    try:
        _with_store(lambda store: revoke_key(store, key_id))
    except KeyError as error:
        fail(error.args[0], code=1)
    typer.echo(f"{key_id} is revoked")


def _day(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M")


def _with_store(use: Callable[[Store], Awaitable[_T]]) -> _T:
    """Runs one call on a store of its own."""
    from perdure.endings import plain_errors, settings
    from perdure.settings import DatabaseSettings
    from perdure.store.engine import Store, make_engine

    url = settings(DatabaseSettings).database_url.get_secret_value()

    async def call() -> _T:
        store = Store(make_engine(url, pool_size=1, application_name="perdure-keys"))
        try:
            return await use(store)
        finally:
            await store.aclose()

    with plain_errors():
        return asyncio.run(call())
