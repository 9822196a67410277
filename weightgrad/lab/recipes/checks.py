"""Checks that the sections of a recipe fit together: names that exist, links that reach, batches that divide."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weightgrad.lab.recipes import expansion
from weightgrad.lab.recipes.document import Loc, Mistake

if TYPE_CHECKING:
    from weightgrad.lab.recipes.recipe import Recipe


def check(recipe: Recipe) -> list[Mistake]:
    """All mistakes of a recipe."""
    checks: tuple[Callable[[Recipe], Iterator[Mistake]], ...] = (
        _sites,
        _links,
        _reach,
        _batch,
        _sharding,
        _stragglers,
        _faults,
    )
    found = [mistake for look in checks for mistake in look(recipe)]
    return found or list(_membership(recipe))


def nearest(word: str, allowed: list[str]) -> str:
    """`did you mean 'x'? ` if something allowed looks like the word, otherwise nothing."""
    close = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _sites(recipe: Recipe) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    for place, entry in enumerate(recipe.sites):
        twice = next((name for name in entry.names if name in seen), None)
        if twice is not None:
            yield Mistake(("sites", place, "name"), f"sites[{seen[twice]}] is called {twice!r} too; names must differ")
        if recipe.server.name in entry.names:
            message = (
                f"the server is called {recipe.server.name!r} too; if it stands in this site, give it a name of its"
                " own and a link as fast as the site's lan"
            )
            yield Mistake(("sites", place, "name"), message)
        seen.update({name: place for name in entry.names if name not in seen})


def _links(recipe: Recipe) -> Iterator[Mistake]:
    seen: dict[tuple[frozenset[str], bool], int] = {}
    for place, entry in enumerate(recipe.links):
        loc: Loc = ("links", place, "between")
        unknown = list(_unknown(recipe, entry.between, loc))
        yield from unknown
        if unknown:
            continue
        first, second = entry.between
        if first == second:
            yield Mistake(loc, f"found {first!r} twice; a link has two different ends")
        elif "{}" in first and "{}" in second:
            yield Mistake(loc, "found two templates; at most one end may be a template")
        else:
            for pair in expansion.ends(recipe, entry.between):
                key = frozenset(pair), expansion.is_template(entry.between)
                if seen.setdefault(key, place) != place:
                    message = f"links[{seen[key]}] is between {pair[0]!r} and {pair[1]!r} too; keep one of them"
                    yield Mistake(loc, message)
                    break


def _unknown(recipe: Recipe, names: tuple[str, ...], loc: Loc) -> Iterator[Mistake]:
    for name in names:
        if not expansion.expand(recipe, name):
            yield Mistake(loc, f"no site or server is called {name!r}; {_there_are(recipe, name, recipe.server.name)}")


def _reach(recipe: Recipe) -> Iterator[Mistake]:
    server = recipe.server.name
    reached = {
        end
        for entry in recipe.links
        for pair in expansion.ends(recipe, entry.between)
        if server in pair
        for end in pair
    }
    for place, entry in enumerate(recipe.sites):
        alone = [name for name in entry.names if name not in reached]
        if alone:
            name = entry.name if len(alone) == len(entry.names) else alone[0]
            line = f"{{between: [{server}, {_quoted(name)}], bandwidth: 100 Mbit/s, delay: 20 ms}}"
            message = f"{_some(alone)} cannot reach the server {server!r}; add a link such as {line}"
            yield Mistake(("sites", place, "name"), message)


def _batch(recipe: Recipe) -> Iterator[Mistake]:
    batch, workers = recipe.training.batch, recipe.workers
    if batch % workers:
        below = batch - batch % workers
        near = f"{below} or {below + workers}" if below else f"{workers}"
        message = f"{batch} samples cannot be shared equally by {workers} workers; nearest that can: {near}"
        yield Mistake(("training", "batch"), message)


def _sharding(recipe: Recipe) -> Iterator[Mistake]:
    for place, entry in enumerate(recipe.sites):
        if entry.sharding != "none" and recipe.training.clip_norm is not None:
            message = (
                f"found {entry.sharding} beside training.clip_norm, which clips the gradient of each worker; "
                f"{entry.sharding} averages them before: remove one of the two"
            )
            yield Mistake(("sites", place, "sharding"), message)


def _stragglers(recipe: Recipe) -> Iterator[Mistake]:
    for place, straggler in enumerate(recipe.compute.stragglers):
        loc: Loc = ("compute", "stragglers", place)
        if straggler.site is None:
            continue
        entries = [entry for entry in recipe.sites if straggler.site in (entry.name, *entry.names)]
        if not entries:
            message = f"no site is called {straggler.site!r}; {_there_are(recipe, straggler.site)}"
            yield Mistake((*loc, "site"), message)
        elif straggler.worker is not None and straggler.worker >= entries[0].workers:
            message = f"found {straggler.worker}; {straggler.site} has the workers 0 to {entries[0].workers - 1}"
            yield Mistake((*loc, "worker"), message)


def _faults(recipe: Recipe) -> Iterator[Mistake]:
    pairs = {frozenset(link.between) for link in expansion.links(recipe)}
    for place, entry in enumerate(recipe.faults):
        kind, target = expansion.fault_target(entry)
        loc: Loc = ("faults", place, kind)
        unknown = list(_unknown(recipe, target if isinstance(target, tuple) else (target,), loc))
        yield from unknown
        if unknown:
            continue
        if isinstance(target, str):
            if kind != "kill" and target == recipe.server.name:
                yield Mistake(loc, f"{target!r} is the server; only sites {kind}, the server can be killed")
        elif any(frozenset(pair) not in pairs for pair in expansion.ends(recipe, target)):
            known = [f"[{', '.join(map(_quoted, link.between))}]" for link in recipe.links]
            message = f"no link is between {target[0]!r} and {target[1]!r}; there are {_some(known)}"
            yield Mistake(loc, message)


def _membership(recipe: Recipe) -> Iterator[Mistake]:
    """A site joins only when it is away and leaves only when it is there."""
    away = set(recipe.absent_at_start)
    if len(away) == sum(len(entry.names) for entry in recipe.sites):
        yield Mistake(("faults",), "every site joins later; at least one must be there at the start")
    events = sorted(enumerate(recipe.faults), key=lambda event: event[1].at_seconds)
    for place, entry in events:
        kind, target = expansion.fault_target(entry)
        if kind not in ("join", "leave") or not isinstance(target, str):
            continue
        for name in expansion.expand(recipe, target):
            if (name in away) != (kind == "join"):
                message = f"{name!r} {'is there already' if kind == 'join' else 'is not there'} at that time"
                yield Mistake(("faults", place, kind), message)
                break
            (away.discard if kind == "join" else away.add)(name)


def _there_are(recipe: Recipe, wrong: str, *others: str) -> str:
    names = [*others, *(name for entry in recipe.sites for name in entry.names[:1000])]
    shown = [*others]
    for entry in recipe.sites:
        shown.append(entry.name if entry.count is None else f"{entry.name} ({entry.names[0]} to {entry.names[-1]})")
    return f"{nearest(wrong, names)}There are {_some(shown)}"


def _quoted(name: str) -> str:
    return f'"{name}"' if "{" in name else name


def _some(names: list[str]) -> str:
    return (", ".join(names[:12]) or "none") + (f" and {len(names) - 12} more" if len(names) > 12 else "")
