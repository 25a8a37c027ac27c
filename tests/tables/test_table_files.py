"""Files with tables: what is read, and what is refused in one line."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perfed.data.problems import DataProblems
from perfed.data.reading import read_arrays
from perfed.errors import PerfedError
from perfed.tables.files import read_sites, read_table

ROWS = [["age", "town", "dose"], ["61", "Jena", "1.5"], ["", "Köln", "2.0"], ["48", "Bad, Ems", "0.5"]]
EXPECTED = pd.DataFrame(
    {"age": ["61", None, "48"], "town": ["Jena", "Köln", "Bad, Ems"], "dose": ["1.5", "2.0", "0.5"]},
    index=[2, 3, 4],
    dtype=object,
)


def text(delimiter: str = ",") -> str:
    return "".join(delimiter.join(f'"{c}"' if "," in c and delimiter == "," else c for c in row) + "\n" for row in ROWS)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(tmp_path, delimiter):
    (tmp_path / "north.csv").write_text(text(delimiter), encoding="utf-8")
    frame, notes = read_table(tmp_path / "north.csv")
    pd.testing.assert_frame_equal(frame, EXPECTED)
    assert notes == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_the_encoding_is_found_and_a_guess_is_said(tmp_path, encoding):
    (tmp_path / "north.csv").write_text(text(), encoding=encoding)
    frame, notes = read_table(tmp_path / "north.csv")
    pd.testing.assert_frame_equal(frame, EXPECTED)
    assert notes == (["read as Windows-1252, since it is not UTF-8"] if encoding == "cp1252" else [])


def test_decimal_commas_are_read_and_said(tmp_path):
    (tmp_path / "north.csv").write_text("a;b\n1,5;x\n-2,25;y\n3;z,z\n3,38e-05;w\n")
    frame, notes = read_table(tmp_path / "north.csv")
    assert frame["a"].tolist() == ["1.5", "-2.25", "3", "3.38e-05"] and frame["b"].tolist() == ["x", "y", "z,z", "w"]
    assert notes == ["numbers are read with a decimal comma"]


def test_blank_lines_and_rows_in_several_lines_keep_the_numbers_of_an_editor(tmp_path):
    (tmp_path / "north.csv").write_text('a,b\n1,x\n\n2,"y\nz"\n,\n3,w\n')
    frame, _ = read_table(tmp_path / "north.csv")
    assert frame.index.tolist() == [2, 5, 7] and frame["a"].tolist() == ["1", "2", "3"]


def test_parquet_and_excel_hold_the_same(tmp_path):
    frame = pd.DataFrame({"age": [61.0, None, 48.0], "town": ["Jena", None, "Ems"], "seen": pd.Timestamp("2024-03-31")})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_excel(tmp_path / "b.xlsx", index=False)
    for name, first in (("a.parquet", 1), ("b.xlsx", 2)):
        found, _ = read_table(tmp_path / name)
        assert found.index.tolist() == [first, first + 1, first + 2]
        pd.testing.assert_frame_equal(
            found.reset_index(drop=True).convert_dtypes(), frame.convert_dtypes(), check_dtype=False
        )


BAD = {
    "empty": (b"", "the file is empty"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00\x01,2\n", "is no text file"),
    "prose": (b"Dear colleague\nfind enclosed\n", "the first row holds one column only"),
    "short row": (b"a,b\n1,2\n3\n", "row 3 is not as wide as the header (1 and 2 cells"),
    "long row": (b"a,b\n1,2\n3,4,5\n", "row 3 is not as wide as the header (3 and 2 cells"),
    "twice": (b"a,b,a\n1,2,3\n", "several columns are called 'a'"),
    "row numbers": (b",a\n0,1\n1,2\n", "column 1 has no name"),
    "no header": (b"1.5,2\n3,4\n", "the first row must hold the names of the columns"),
    "Excel's delimiter": (b"sep=;\na;b\n1;2\n", "row 1 tells Excel the delimiter ('sep=') and is not a header; remove"),
    "Excel's delimiter, quoted": (b'"sep=,"\r\na,b\r\n1,2\r\n', "row 1 tells Excel the delimiter"),
    "Excel's tab": (b"\xef\xbb\xbfSEP=\t\na\tb\n1\t2\n", "row 1 tells Excel the delimiter"),
    "delimiters behind rows": (b"a,b\n1,2,\n3,4,\n", "row 2 ends with a comma that the header lacks; remove the comma"),
    "delimiters behind all": (
        b"a;b;;\n1;2;;\n3;4;;\n",
        "column 3 has no name and holds nothing, as where each row ends",
    ),
    "merged header": (
        b"lab,,sex\n1,2,f\n",
        "column 2 has no name, as where one header cell stands for several columns",
    ),
    "merged header at the end": (b"sex,lab,\nf,1,2\n", "column 3 has no name, as where one header cell stands for"),
    "UTF-16 without a mark": ("a,b\n1,ü\n".encode("utf-16-le"), "this looks like UTF-16 without a byte-order mark"),
    "the other UTF-16": ("a,b\r\n1,2\r\n".encode("utf-16-be"), "this looks like UTF-16 without a byte-order mark"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_csv_is_refused_in_one_line(tmp_path, name):
    content, expected = BAD[name]
    (tmp_path / "north.csv").write_bytes(content)
    with pytest.raises(PerfedError) as error:
        read_table(tmp_path / "north.csv")
    assert str(error.value).startswith(f"{tmp_path / 'north.csv'}: {expected}") and "\n" not in str(error.value)


@pytest.mark.parametrize("ending", ["parquet", "xlsx"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, ending):
    (tmp_path / f"north.{ending}").write_bytes(b"nothing of the kind")
    with pytest.raises(PerfedError, match="cannot be read as"):
        read_table(tmp_path / f"north.{ending}")


def test_several_sheets_and_unknown_endings_are_refused(tmp_path):
    with pd.ExcelWriter(tmp_path / "a.xlsx") as file:
        EXPECTED.to_excel(file, sheet_name="one", index=False)
        EXPECTED.to_excel(file, sheet_name="two", index=False)
    (tmp_path / "a.sav").write_bytes(b"x")
    with pytest.raises(PerfedError, match=r"holds several sheets \(one, two\)"):
        read_table(tmp_path / "a.xlsx")
    with pytest.raises(PerfedError, match=r"'\.sav' is not the ending of a table; allowed: \.csv"):
        read_table(tmp_path / "a.sav")


def test_a_folder_has_one_site_a_file(tmp_path):
    for site in ("north", "south"):
        (tmp_path / f"{site}.csv").write_text(text())
    (tmp_path / "readme.md").write_text("no table")
    found = read_sites([tmp_path])
    assert list(found.frames) == ["north", "south"] and found.sources["north"] == str(tmp_path / "north.csv")


def test_a_column_names_the_sites(tmp_path):
    (tmp_path / "all.csv").write_text("ward,age\nb,1\na,2\nb,3\n")
    found = read_sites([tmp_path / "all.csv"], "ward")
    assert {site: frame["age"].tolist() for site, frame in found.frames.items()} == {"a": ["2"], "b": ["1", "3"]}
    assert found.frames["b"].index.tolist() == [2, 4] and found.sources["a"].endswith("all.csv (ward = a)")
    with pytest.raises(PerfedError, match=r"no column 'wards' \(did you mean 'ward'\?\)$"):
        read_sites([tmp_path / "all.csv"], "wards")
    (tmp_path / "all.csv").write_text("ward,age\nb,1\n,2\n")
    with pytest.raises(PerfedError, match="column 'ward' names no site in row 3"):
        read_sites([tmp_path / "all.csv"], "ward")


def test_two_sites_of_one_name_are_refused_and_all_problems_are_kept(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    (tmp_path / "x" / "north.csv").write_text(text())
    (tmp_path / "y" / "North.csv").write_text(text())
    (tmp_path / "y" / "bad.csv").write_text("")
    with pytest.raises(DataProblems) as error:
        read_sites([tmp_path / "x", tmp_path / "y"])
    first, second = sorted(error.value.problems)
    assert "site 'North' is also in" in first and "the file is empty" in second
    with pytest.raises(PerfedError, match="no such file or folder"):
        read_sites([tmp_path / "z"])


def test_what_is_no_table_in_a_folder_is_left_out_and_said(tmp_path):
    for site in ("north", "south"):
        (tmp_path / f"{site}.csv").write_text(text())
    (tmp_path / "note.txt").write_text("Dear all, the units have changed.")
    for name in ("~$north.xlsx", "notes.txt", "letter.pdf", "south.xls", ".hidden.csv", "._south.csv", "study.toml"):
        (tmp_path / name).write_text("Dear all, the units\nhave changed.\n")
    (tmp_path / "old.csv").mkdir()
    found = read_sites([tmp_path])
    assert list(found.frames) == ["north", "south"]
    first, short, second = found.notes
    assert short == f"{tmp_path / 'note.txt'}: left out, for it is no table: there are no rows"
    assert first == f"{tmp_path}: left out, for they are no tables: letter.pdf, south.xls, ~$north.xlsx"
    assert second.startswith(f"{tmp_path / 'notes.txt'}: left out, for it is no table: row 2 is not as wide")
    with pytest.raises(PerfedError, match=r"notes\.txt: row 2 is not as wide"):
        read_sites([tmp_path / "north.csv", tmp_path / "notes.txt"])
    (tmp_path / "west.csv").write_text("age\n")
    with pytest.raises(PerfedError, match=r"west\.csv: the first row holds one column only"):
        read_sites([tmp_path])


def test_tables_that_are_texts_are_not_left_out(tmp_path):
    (tmp_path / "north.txt").write_text(text())
    (tmp_path / "south.txt").write_text(text() + "1\n")
    with pytest.raises(PerfedError, match=r"south\.txt: row \d is not as wide"):
        read_sites([tmp_path])


def test_a_packed_file_that_memory_cannot_hold_is_not_read(tmp_path, monkeypatch):
    """A Parquet file of a megabyte can hold 200 million rows: its footer says so."""
    frame = pd.DataFrame({"a": np.zeros(100_000), "b": "x"})
    frame.to_parquet(tmp_path / "a.parquet")
    frame[:100].to_excel(tmp_path / "b.xlsx", index=False)
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros((100_000, 2)))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 20_000
    for module, bytes_ in (("tables.files", 2**20), ("data.reading", 1000)):
        monkeypatch.setattr(f"perfed.{module}.available_memory", lambda bytes_=bytes_: bytes_)
    monkeypatch.setattr(pd, "read_parquet", lambda *given: pytest.fail("it was read"))
    monkeypatch.setattr(np, "load", lambda *given, **more: pytest.fail("it was read"))
    says = r"a\.parquet: 100,000 rows of 2 columns need about 0\.0119 GiB of memory, and there are 0\.000977;"
    with pytest.raises(PerfedError, match=says):
        read_table(tmp_path / "a.parquet")
    with pytest.raises(PerfedError, match=r"b\.xlsx: unpacked it needs"):
        read_table(tmp_path / "b.xlsx")
    for read in (read_arrays, lambda file: read_arrays(file, ["x"])):
        with pytest.raises(PerfedError, match=r"c\.npz: unpacked it needs 0\.00149 GiB of memory"):
            read(tmp_path / "c.npz")
