"""The federation of a finished run with the rows of one site, which are read, and what is kept of the others."""

from __future__ import annotations

from dataclasses import replace

from perfed.data.domain_input import completed
from perfed.data.facts import ClientFacts
from perfed.data.federation import Federation
from perfed.data.federation_schema import FederationSchema
from perfed.data.lazy import elsewhere
from perfed.datasets.tables import site_client
from perfed.errors import PerfedError
from perfed.experiment.config import read
from perfed.run.directory import RunDirectory


def site_alone(directory: RunDirectory, site: str) -> Federation | None:
    """What :meth:`perfed.run.own_model.OwnModels.site` needs for ``site``; no other site's table is read.

    Returns:
        ``None`` where all data are needed: the run is not of tables or has not finished, does not have the site, or
        makes something of the data of all clients.

    Raises:
        PerfedError: the site's table cannot be read, or is another than that of the run.
    """
    kept = directory.read_sites()
    if kept is None or site not in kept["facts"]:
        return None
    experiment = read(directory.read_config(), str(directory.path / "config.toml"))
    if "files" not in experiment.data.options:  # a named data set of tables is read as a whole
        return None
    if experiment.built_method.changes_data or experiment.evaluation.split == "validation":
        return None
    where = str(directory.path / "sites.json")
    agreement = FederationSchema.of_plain(kept["agreement"], where)
    try:
        facts = {name: ClientFacts.of_plain(values) for name, values in kept["facts"].items()}
    except PerfedError as error:
        raise PerfedError(f"{where}: {error}") from None
    options = experiment.data.options
    own = site_client(options, experiment.seed, site, agreement)
    alone = Federation.of_agreement((own,), agreement, name=experiment.data.name)
    made = completed(alone, options["validation_fraction"], options["domain_input"], experiment.seed)
    (client,) = made
    if replace(client.facts(made.survival), feature_names=None) != facts.pop(site):
        raise PerfedError(f"site '{site}': its data are not those that the run in {directory.path} was begun with")
    return replace(made, clients=(client, *elsewhere(facts.values(), made.num_classes, made.survival)))
