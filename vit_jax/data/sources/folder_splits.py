"""Which folders of a folder of images are its splits, by their names.

Folders called train, val, validation and test are splits. If there are none of these, folders stand for splits whose
names say so in other words, as `name_splits` reads them: `Training` and `Testing`, `seg_train` and `seg_test`. The
classes of a split may lie one folder deeper, in a folder of the same split: `seg_train/seg_train/<class>`.
"""

from vit_jax import UserError
from vit_jax.data.sources.folder_tree import LAYOUT, FolderTree, join_relative
from vit_jax.data.sources.splits import name_splits

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}  # folder -> split
WANTED = f"it must contain {LAYOUT}"


def split_folders(tree: FolderTree, has_label_file: bool) -> dict[str, str]:
    """Returns split -> folder below the root ('' is the root).

    Args:
        tree: the folder.
        has_label_file: whether a label file may list images that lie in the root itself.

    Raises:
        UserError: there is neither `{train,val,test}/<class>/*` nor `<class>/*`, or the names of the folders can be
            read as splits and as classes.
    """
    if inner := tree.kaggle_folder():
        raise UserError(f"{tree.root} is Kaggle's ImageNet; use --config.data.source=folder:{inner}")
    root, folders, images = tree.root, tree.subfolders(""), tree.images_in("")
    exact = [name for name in folders if name in SPLITS]
    if images and (exact or not has_label_file):
        raise UserError(f"{root} contains images directly ({first_names(images)}); {WANTED}")
    if not folders and not images:
        raise UserError(f"the folder {root} contains no class folders; {WANTED}")
    named = {} if images else name_splits(folders)
    others = [name for name in folders if name not in named]
    if exact and others:
        raise UserError(
            f"{root} contains both split folders ({first_names(exact)}) and other folders ({first_names(others)}); "
            f"{WANTED}"
        )
    # A single class may be called after a split, such as Train among vehicles. It has no classes in it.
    if others and named and (len(set(named.values())) > 1 or any(tree.subfolders(name) for name in named)):
        beside = first_names(others)
        raise UserError(
            f"the folders of {root} can be read in two ways: as the splits {first_names([*named])}, beside {beside}, "
            f"or as {len(folders)} classes; to read splits, move {beside} elsewhere; to read classes, move all of them "
            f"into a folder {root}/train"
        )
    if others or not named:
        check_inside(tree, folders)
        return {"train": ""}
    return place_splits(tree, named)


def place_splits(tree: FolderTree, named: dict[str, str]) -> dict[str, str]:
    """Returns split -> its folder, given folder -> split; raises UserError if two folders stand for the same split."""
    placed: dict[str, str] = {}
    for name, split in named.items():
        if split in placed:
            raise UserError(
                f"the folder {tree.root} contains both {placed[split]} and {name}, which stand for the same split; "
                f"keep one of them or, if they are classes, move them into a folder {tree.root}/train"
            )
        placed[split] = name
    return {split: inner_folder(tree, name, split) for split, name in placed.items()}


def inner_folder(tree: FolderTree, folder: str, split: str) -> str:
    """Returns the folder with the classes of a split: `folder`, or the only one in it if that is of the same split."""
    inside = tree.subfolders(folder)
    if len(inside) == 1 and name_splits(inside).get(inside[0]) == split and not tree.images_in(folder):
        inner = join_relative(folder, inside[0])
        return inner if tree.subfolders(inner) else folder
    return folder


def check_inside(tree: FolderTree, folders: list[str]) -> None:
    """Raises UserError if the only folder, which would be the only class, contains splits."""
    inside = tree.subfolders(folders[0]) if len(folders) == 1 else []
    if inside and len(set(name_splits(inside).values())) > 1:
        place = tree.full_path(folders[0])
        raise UserError(
            f"the only folder of {tree.root} contains the splits {first_names(inside)}; use "
            f"--config.data.source=folder:{place}"
        )


def describe_splits(folders: dict[str, str]) -> str:
    """Returns which folders, split -> folder, are read as splits by other names than their own; empty if none is."""
    renamed = sorted(f"{folder} as {split}" for split, folder in folders.items() if folder and folder not in SPLITS)
    return f"with {', '.join(renamed)}" if renamed else ""


def first_names(names: list[str]) -> str:
    """Returns the first few of the names as one string, for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
