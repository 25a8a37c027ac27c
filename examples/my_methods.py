"""A method of your own: FedPer with further epochs of the head, checked and compared.

Run: python examples/my_methods.py (a minute). On the command line, in this folder:
perfed compare digits-label-skew --methods my_methods:my-fedper,fedper,fedpac
"""

from pydantic import Field

from perfed.method import Method, Reply
from perfed.placement import PERSONAL, SHARED
from perfed.registry import register


@register("my-fedper", title="MyFedPer")
class MyFedPer(Method):
    """Shared body, personal head, trained together (Arivazhagan et al. 2019)."""

    default_placement = {"embedding": SHARED, "body": SHARED, "head": PERSONAL}
    needs_mean = ""  # any kind of [aggregation] may take the place of the mean
    head_epochs: int = Field(1, ge=0, description="further epochs of the head alone")

    def round(self, server, clients):  # runs on the server
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(reply.shared, reply.num_samples, current=server.shared)

    def train(self, cohort, shared):  # runs where the data is; every tensor has a leading client axis
        cohort.load(shared)
        cohort.fit(("embedding", "body", "head"), epochs=self.local_epochs)
        cohort.fit("head", epochs=self.head_epochs)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)


if __name__ == "__main__":
    import perfed
    from perfed.testing import check_method

    check_method(MyFedPer)
    print("MyFedPer passes the checks that perfed's own methods pass")

    def clients(seed: int) -> perfed.Federation:
        options = {"clients": 20, "classes_per_client": 4, "samples": 12, "test_samples": 200, "overlap": "test"}
        return perfed.load("digits", {"partition": "pathological", **options}, seed=seed)

    model = {"body": {"kind": "mlp", "hidden": [64], "out": 32}, "head": "linear"}
    methods = ["my-fedper", "fedper", "fedpac", "local"]
    result = perfed.compare(clients, methods, model=model, rounds=30, training={"lr": 3e-3})
    print(result.verdict)
