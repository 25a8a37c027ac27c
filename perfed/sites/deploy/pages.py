"""The pages for the administrators of the server and of each site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from perfed.data.names import markdown_code, markdown_text
from perfed.experiment.config import Experiment
from perfed.sites.deploy.candidates import format_title, is_blend, list_entries
from perfed.sites.deploy.deployment import Deployment
from perfed.sites.deploy.part import list_user_modules
from perfed.sites.deploy.release import Release
from perfed.sites.deploy.server_files import fill_template, hash_app, make_template_values
from perfed.sites.deploy.study import describe_metadata, list_column_settings
from perfed.sites.flower.processes import VERSION_RANGE

_COLUMNS = {
    "own": "Your columns are your own: other sites may have others.",
    "common": "Of your columns those enter that every site has; all others are left out.",
    "named": "Your columns that another site has too, by name, mean the same at all of these; others stay your own.",
    "union": "Columns that another site has and you lack are filled, so that all sites have the same.",
}


@dataclass(frozen=True)
class Credentials:
    """The fingerprints that a site and the server's administrator compare in a deployment with TLS.

    Attributes:
        authority: the fingerprint of the authority's certificate.
        keys: the fingerprint of each site's public key.
    """

    authority: str
    keys: Mapping[str, str]


def make_server_page(deployment: Deployment, study: Experiment, release: Release) -> str:
    """Return the page of the server's administrator."""
    values = _make_common_values(deployment, study, release) | {"rows": _make_file_table(deployment.tls)}
    if deployment.tls:
        steps, later = (fill_template(name, values) for name in ("steps-tls.md", "later-tls.md"))
        values |= {"steps": steps, "later": later, "protection": _PROTECTION, "logs": _LOGS}
    else:
        values |= {"steps": fill_template("steps-trial.md", values), "later": "", "protection": _TRIAL_PROTECTION}
        values |= {"logs": "* Logs are what the terminals show."}
    return fill_template("README.md", values)


_PROTECTION = """\
* the SuperLink listens on this machine's loopback address alone. Whoever has an account on this machine can submit:
  give one to nobody else;
* sites come through a proxy that passes on the path `/v1/fleet/` and nothing else, and never learn of the others. It
  bounds bodies, requests, rates and times of who has no key; `nginx.conf` says what it does not bound, and what does;
* only sites whose public key was made known to the SuperLink can connect. A site's private key is the site: it is in
  that site's folder, and nowhere else once it has been handed over."""
_TRIAL_PROTECTION = """\
* the SuperLink listens on this machine's loopback address alone, and whoever has an account on this machine can submit,
  or connect under any site's name. For sites that are elsewhere, or a machine with other users, `perfed deploy` has
  `--tls`."""
_LOGS = (
    "* Logs: `journalctl --unit perfed-superlink`, `--unit perfed-superexec`; with containers `docker compose logs`."
)


def _make_file_table(tls: bool) -> str:
    """Return the rows of the table of a deployment's files."""
    rows = [
        ("`app/`", "what is submitted: the server's program, two lines, and `study.toml`, the experiment; no data"),
        ("`server/`", "SuperLink and SuperExec: the scripts that start them, and systemd units that call these"),
        ("`sites/NAME/`", "for site NAME: its page (`README.md`) and a systemd unit"),
        ("`deployment.toml`", "the names and addresses that all of it was made with"),
        ("`release/`", "the wheel of perfed and the list of its packages, with which server and sites install it"),
    ]
    if tls:
        rows[1] = (
            "`server/`",
            f"{rows[1][1]}; proxy (`nginx.conf`), containers (`compose.yaml`), public keys of sites",
        )
        rows[2] = ("`sites/NAME/`", "for site NAME: its page (`README.md`), a systemd unit, its private key, `ca.crt`")
        rows.append(("`tls/`", "the private authority that the sites trust; `ca.key` is a secret"))
    return "\n".join(f"| {name} | {purpose} |" for name, purpose in rows)


def make_site_files(
    deployment: Deployment, study: Experiment, site: str, credentials: Credentials | None, release: Release
) -> dict[str, str]:
    """Return a site's page, systemd unit, study and policy by their paths in the deployment's directory."""
    command = f"perfed site --data {site}.csv --server {deployment.address} --name {site} --study study.toml"
    command += "" if credentials is None else f" --key {site}.key --ca ca.crt"
    budget = None if study.privacy is None else study.privacy.epsilon
    command += "" if budget is None else " --policy policy.toml"
    values = _make_common_values(deployment, study, release) | {
        "site": site,
        "calls": _describe_allowed_addresses(deployment.host),
        "command": command,
        "budget": "# epsilon = 6.0" if budget is None else f"epsilon = {budget!r}",
        "policy": "" if budget is None else _BUDGET.format(f"{budget:g}"),
        "preview": f"perfed site preview --data {site}.csv --study study.toml --name {site}",
        "settings": "\n".join(f"* {markdown_code(line)}" for line in list_column_settings(study)),
        "columns": _COLUMNS[study.data.options["columns"]],
        "app": _describe_app_hash(study),
        "told": markdown_text("; ".join(describe_metadata(study))) or "nothing",
        "sent": "\n".join(f"  * `{name}`" for name in list_entries(study)) or "  * nothing",
        "masks": _describe_masks(study, site),
        "mixed": _MIXED if is_blend(study) else "",
        **(_PLAIN if study.privacy is None else _PRIVATE[study.privacy.unit]),
        **(
            {}
            if study.privacy is None or study.privacy.metrics == "none"
            else {"measured": _describe_noisy_metrics(study)}
        ),
        "files": "" if credentials is None else _describe_key_files(site, credentials),
        "key_leaves": "" if credentials is None else " With every call a signature made with its key, never the key.",
        "tls_failures": "" if credentials is None else _TLS_FAILURES,
    }
    folder = f"sites/{site}"
    unit = fill_template("perfed-site.service", values)
    page, policy = fill_template("site.md", values), fill_template("policy.toml", values)
    files = {"README.md": page, "perfed-site.service": unit, "study.toml": study.to_toml(), "policy.toml": policy}
    return {f"{folder}/{name}": content for name, content in files.items()}


_MIXED = """
* The study mixes several models at your site. Each method is trained once on all your training rows, and once for each
  fold of these, with its metrics on the fold. Then `blend/` leaves: sums over your training rows, of how likely the
  candidates make them. What a candidate says of a row does not leave, nor do the weights of your site."""
_MASKS = """
  All of these leave under masks (secure aggregation): a server that follows the protocol gets their sums over the
  sites, and no site's own."""
_MASKS_KEYS = """
  Your site checks the keys of the other sites against those in `study.toml` (`[secure_aggregation.keys]`). Compare each
  of them with the administrator of that site, by telephone or in person: masks protect you from a dishonest server only
  if the keys are theirs. Yours is `{}`, which `perfed site key` must print."""
_MASKS_NO_KEYS = """
  The study has no keys of the sites (`[secure_aggregation.keys]`). A dishonest server could therefore put keys of its
  own in the place of theirs, and read what your site sends."""


_BUDGET = """
It lets all runs of your site together spend an epsilon of {}, what one run of this study may spend. To take part in
another run, decide on a larger one there."""

_PLAIN = {
    "measured": "With it, the loss of training and the metrics of your model on your test rows.",
    "counts": " (of each class, of each domain, or with an event)",
    "noise": "this deployment adds no noise to them.",
}


def _describe_noisy_metrics(study: Experiment) -> str:
    """Return the text of a site's page about metrics that are sent with noise."""
    names = ", ".join(dict.fromkeys(["accuracy (mse)", *study.evaluation.requested_metrics]))
    after = "each round that is evaluated" if study.evaluation.every < study.rounds else "the last rounds"
    return (
        f"No loss of training. After {after}, metrics of your model on your test rows ({names}), with noise made on "
        "your\n  machine; `spent.json` counts them. `metrics.jsonl` of the run's folder there has the exact ones."
    )


_PRIVATE = {
    unit: {
        "measured": "No loss of training and no metric: `metrics.jsonl` of the run's folder on your machine has them.",
        "counts": "",
        "noise": f"the study's table `[privacy]` bounds that for each {who}. What your machine has spent of it\n"
        f"stands in `spent.json`; noise is made {where}",
    }
    for unit, who, where in (
        ("sample", "row", "on your machine, with a secret that never leaves it."),
        ("client", "site", "by the server, or under masks on each site's machine."),
    )
}


def _describe_masks(study: Experiment, site: str) -> str:
    """Return the text of a site's page about masks."""
    if study.secure_aggregation is None:
        return ""
    keys = study.secure_aggregation.keys
    return _MASKS + (_MASKS_NO_KEYS if keys is None else _MASKS_KEYS.format(keys[site]))


def _describe_allowed_addresses(host: str) -> str:
    """Return the lines of a systemd unit about the addresses that a site may connect to.

    A host that is a name has no address before it is resolved; the lines are then a comment.
    """
    try:
        return f"# And nobody else, unless it is added.\nIPAddressDeny=any\nIPAddressAllow=localhost {ip_address(host)}"
    except ValueError:
        return (
            f"# {host} is a name, and units know addresses alone. Where those of the server, of what resolves\n"
            "# names and of your proxy are known: IPAddressDeny=any and IPAddressAllow=localhost ADDRESS ADDRESS"
        )


def _describe_app_hash(study: Experiment) -> str:
    app_hash = hash_app(study)
    note = f"made with {VERSION_RANGE}; with a further site the study is another one, and so is its hash"
    return f"\nThat of this study is `{app_hash}` ({note}).\n" if app_hash else ""


_TLS_FAILURES = """\
* *The certificate is not accepted*: is `ca.crt` the file that you were given, is your clock right, and has the server's
  certificate ended? Ask its administrator.
* *The key is not known*: the server's administrator has to register it; compare the fingerprint.
"""


def _describe_key_files(site: str, credentials: Credentials) -> str:
    return f"""
## Your files

Put these beside your table, in `/opt/perfed`:

| file | what it is | fingerprint |
|---|---|---|
| `{site}.key` | your site's private key: whoever has it is taken for you | `{credentials.keys[site]}` |
| `ca.crt` | says which server is the right one | `{credentials.authority}` |

Ask the server's administrator for both fingerprints by telephone, and compare them with what your own machine says:

```sh
chmod 600 {site}.key
ssh-keygen -l -f {site}.key
openssl x509 -noout -fingerprint -sha256 -in ca.crt
```

If they differ, do not start. If somebody else has seen the key, say so: the server's administrator can bar it and make
you another.
"""


def _make_common_values(deployment: Deployment, study: Experiment, release: Release) -> dict[str, Any]:
    """Return the values of the placeholders that the pages of the server and of the sites share."""
    modules = list_user_modules(study)
    modules_text = (
        f"\nThe study uses modules of its own: {', '.join(f'`{name}`' for name in modules)}. They must be importable "
    )
    return make_template_values(deployment, release) | {
        "purpose": markdown_text(study.description or f"A study called {study.name}."),
        "method": format_title(study),
        "rounds": study.rounds,
        "sites_in_words": _join_names(list(deployment.sites)),
        "modules": f"{modules_text} where perfed is installed, at the server and at every site.\n" if modules else "",
    }


def _join_names(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
