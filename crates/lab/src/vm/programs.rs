//! Finds a scenario's programs and their files on this machine, and builds their start commands.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_guest::config::Cgroup;
use demeter_scenario::{Figure, Program, Programs, Scenario};

use super::elf;
use super::initramfs::Initramfs;
use super::tree::Tree;
use crate::error::Error;
use crate::launch::Launch;

/// Folders of a distribution's programs.
const BIN_DIRS: [&str; 6] = [
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
    "/usr/sbin",
    "/sbin",
    "/usr/games",
];

/// Mount point of cgroups (v2).
const CGROUPS: &str = "/sys/fs/cgroup";

/// Working folder of programs in a VM; each has a folder of its name.
const WORK_DIR: &str = "/work";

/// Files that the C library reads to resolve user and host names.
const TEXTS: [(&str, &str); 3] = [
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/hosts", "127.0.0.1 localhost\n"),
    (
        "etc/passwd",
        "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n",
    ),
];

/// Searches for programs.
#[derive(Debug)]
pub struct Finder<'a> {
    /// Folder with our own programs.
    pub own: &'a Path,
    /// Unpacked packages, if the scenario names any.
    pub tree: Option<Tree>,
}

impl<'a> Finder<'a> {
    /// A finder for a scenario's programs. It searches our own programs in `own`, the packages that any of the programs
    /// names, and this machine.
    pub fn new(own: &'a Path, cache: &Path, programs: &Programs) -> Result<Self, Error> {
        let names = programs.programs.iter().flat_map(|p| &p.packages);
        let names: BTreeSet<&str> = names.map(String::as_str).collect();
        let tree = (!names.is_empty()).then(|| Tree::of(cache, &names));
        Ok(Self {
            own,
            tree: tree.transpose()?,
        })
    }

    /// Resolves the first word of a command to a file.
    fn find(&self, program: &Program, word: &str) -> Result<PathBuf, Error> {
        let path = Path::new(word);
        let in_tree = |path: &Path| self.tree.as_ref().and_then(|tree| tree.file(path));
        let here = |path: &Path| path.is_file().then(|| path.to_owned());
        let found = if word.contains('/') {
            let absolute = std::path::absolute(path).map_err(Error::io("find", path))?;
            in_tree(path).or_else(|| here(&absolute))
        } else {
            let own = || {
                demeter_workload::PROGRAMS
                    .contains(&word)
                    .then(|| self.own.join(word))
            };
            let installed = || BIN_DIRS.iter().map(|dir| Path::new(dir).join(word));
            let path = std::env::var_os("PATH").unwrap_or_default();
            let path = || std::env::split_paths(&path).map(|dir| dir.join(word));
            installed()
                .find_map(|path| in_tree(&path))
                .or_else(|| own().and_then(|path| here(&path)))
                .or_else(|| path().chain(installed()).find_map(|path| here(&path)))
        };
        found.ok_or_else(|| Error::Missing {
            what: format!("program {}: there is no {word}", program.name()),
            hint: "give its path, or its package in packages".into(),
        })
    }

    fn library_dirs(&self) -> Result<Vec<PathBuf>, Error> {
        self.tree.as_ref().map_or(Ok(vec![]), Tree::library_dirs)
    }

    /// Libraries of all programs in the packages, since a command may be a shell that starts others.
    fn needed_by_all(&self) -> Result<Vec<PathBuf>, Error> {
        let mut libraries = vec![];
        if let Some(tree) = &self.tree {
            for file in tree.dynamic_programs()? {
                libraries.extend(elf::needed(&file, &self.library_dirs()?)?.files);
            }
        }
        Ok(libraries)
    }

    /// Loader and libraries of a program's file.
    fn needed(&self, program: &Program, file: &Path) -> Result<Vec<PathBuf>, Error> {
        let needed = elf::needed(file, &self.library_dirs()?)?;
        match needed.missing {
            None => Ok(needed.files),
            Some(missing) => Err(Error::Missing {
                what: format!(
                    "program {}: {} needs {missing}, which is missing",
                    program.name(),
                    file.display()
                ),
                hint: "install it, or name its package in packages".into(),
            }),
        }
    }
}

/// Adds a scenario's programs to a VM; returns their start commands.
pub fn into_vm(
    initramfs: &mut Initramfs,
    finder: &Finder<'_>,
    scenario: &Scenario,
    programs: &Programs,
) -> Result<Vec<Launch>, Error> {
    for (name, text) in TEXTS {
        initramfs.add_text(name, text.into());
    }
    let mut libraries: BTreeSet<PathBuf> = finder.needed_by_all()?.into_iter().collect();
    if let Some(tree) = &finder.tree {
        for file in tree.files()? {
            add_as_it_is(initramfs, tree, &file)?;
        }
    }
    let mut launches = vec![];
    for program in &programs.programs {
        let mut bring = |word: &str| -> Result<PathBuf, Error> {
            let file = finder.find(program, word)?;
            libraries.extend(finder.needed(program, &file)?);
            let place = place_in_vm(finder, &file);
            initramfs.add_file(&place.to_string_lossy(), &file);
            Ok(place)
        };
        let file = bring(&program.command[0])?;
        let figure = with_command(&program.figure, &mut bring)?;
        let folder = Path::new(WORK_DIR).join(program.name());
        initramfs.add_folder(&folder.to_string_lossy());
        for data in &program.files {
            if !data.is_file() {
                return Err(missing_data(program, data));
            }
            let name = folder.join(data.file_name().unwrap_or_default());
            initramfs.add_file(&name.to_string_lossy(), data);
        }
        launches.push(launch(scenario, program, file, folder, figure));
    }
    let mut dirs = BTreeSet::new();
    for library in libraries {
        let place = place_in_vm(finder, &library);
        dirs.extend(place.parent().map(|dir| dir.display().to_string()));
        initramfs.add_file(&place.to_string_lossy(), &library);
    }
    let dirs: Vec<String> = dirs.into_iter().collect();
    for launch in &mut launches {
        set_environment(launch, &BIN_DIRS.join(":"), &dirs.join(":"));
    }
    Ok(launches)
}

/// Returns the start commands of a scenario's programs on this machine. Each runs in a new folder of its name in
/// `work`, with links to its data.
pub fn in_place(
    finder: &Finder<'_>,
    scenario: &Scenario,
    programs: &Programs,
    work: &Path,
) -> Result<Vec<Launch>, Error> {
    let in_tree = |dir: &str| {
        finder
            .tree
            .as_ref()
            .map(|tree| tree.at_root(Path::new(dir)))
    };
    let unpacked = BIN_DIRS.iter().filter_map(|dir| in_tree(dir));
    let path = unpacked.chain(BIN_DIRS.iter().map(PathBuf::from));
    let path: Vec<String> = path.map(|dir| dir.display().to_string()).collect();
    // The loader finds the system's own libraries.
    let of_packages = |libraries: Vec<PathBuf>| -> Vec<String> {
        let tree = finder.tree.as_ref();
        let of_tree = |library: &PathBuf| tree.is_some_and(|tree| tree.place(library).is_some());
        let of_tree = libraries.into_iter().filter(of_tree);
        let dirs = of_tree.filter_map(|library| Some(library.parent()?.display().to_string()));
        dirs.collect()
    };
    let dirs_of_all: BTreeSet<String> = of_packages(finder.needed_by_all()?).into_iter().collect();
    let mut launches = vec![];
    for program in &programs.programs {
        let mut dirs = dirs_of_all.clone();
        let mut resolve = |word: &str| -> Result<PathBuf, Error> {
            let file = finder.find(program, word)?;
            dirs.extend(of_packages(finder.needed(program, &file)?));
            Ok(file)
        };
        let file = resolve(&program.command[0])?;
        let figure = with_command(&program.figure, &mut resolve)?;
        let folder = work.join(program.name());
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        for data in &program.files {
            if !data.is_file() {
                return Err(missing_data(program, data));
            }
            let link = folder.join(data.file_name().unwrap_or_default());
            let data = std::path::absolute(data).map_err(Error::io("find", data))?;
            symlink(data, &link).map_err(Error::io("create", &link))?;
        }
        let mut launch = launch(scenario, program, file, folder, figure);
        let dirs: Vec<String> = dirs.into_iter().collect();
        set_environment(&mut launch, &path.join(":"), &dirs.join(":"));
        launches.push(launch);
    }
    Ok(launches)
}

/// Adds a file of the packages at its path, keeping links as links.
fn add_as_it_is(initramfs: &mut Initramfs, tree: &Tree, file: &Path) -> Result<(), Error> {
    let place = tree.place(file).unwrap_or_default();
    let place = place.to_string_lossy();
    let kind = fs::symlink_metadata(file).map_err(Error::io("read", file))?;
    if kind.is_symlink() {
        let target = fs::read_link(file).map_err(Error::io("read", file))?;
        initramfs.add_link(&place, &target.to_string_lossy());
    } else if kind.is_file() {
        initramfs.add_file(&place, file);
    }
    Ok(())
}

/// Path of a local file in a VM: our own programs and the user's go to /bin.
fn place_in_vm(finder: &Finder<'_>, file: &Path) -> PathBuf {
    let of_package = finder.tree.as_ref().and_then(|tree| tree.place(file));
    of_package.unwrap_or_else(|| {
        let is_of_system = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"]
            .iter()
            .any(|dir| file.starts_with(dir));
        match is_of_system || elf_library(file) {
            true => file.to_owned(),
            false => Path::new("/bin").join(file.file_name().unwrap_or_default()),
        }
    })
}

fn elf_library(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.contains(".so")
}

/// Resolves the first word of a figure's command.
fn with_command(
    figure: &Figure,
    resolve: &mut dyn FnMut(&str) -> Result<PathBuf, Error>,
) -> Result<Figure, Error> {
    let mut figure = figure.clone();
    if let Figure::Number(number) = &mut figure
        && let Some(word) = number.command.first_mut()
    {
        *word = resolve(word)?.to_string_lossy().into_owned();
    }
    Ok(figure)
}

fn launch(
    scenario: &Scenario,
    program: &Program,
    file: PathBuf,
    folder: PathBuf,
    figure: Figure,
) -> Launch {
    let filled_in = |word: &String| {
        word.replace("{seed}", &scenario.seed.to_string())
            .replace("{duration_s}", &scenario.duration_s.to_string())
    };
    Launch {
        name: program.name().into(),
        file,
        args: program.command[1..].iter().map(filled_in).collect(),
        env: program.env.clone(),
        folder,
        ready: program.ready.clone(),
        ready_within: Duration::from_secs(program.ready_within_s),
        figure,
        cgroup: program.cgroup.map(|share| Cgroup {
            path: Path::new(CGROUPS).join(program.name()),
            guarantee_mib: share.guarantee_mib,
            weight: share.weight,
        }),
    }
}

/// Sets the default environment of a program, unless its scenario sets it.
fn set_environment(launch: &mut Launch, path: &str, libraries: &str) {
    let home = launch.folder.display().to_string();
    let mut env: BTreeMap<String, String> = [("PATH", path), ("HOME", &home), ("LANG", "C")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    if !libraries.is_empty() {
        env.insert("LD_LIBRARY_PATH".into(), libraries.into());
    }
    env.append(&mut launch.env);
    launch.env = env;
}

fn missing_data(program: &Program, data: &Path) -> Error {
    Error::Missing {
        what: format!(
            "program {}: there is no file {}",
            program.name(),
            data.display()
        ),
        hint: "files are named relative to the current folder".into(),
    }
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Workload;

    use super::*;

    /// A scenario with these programs.
    fn scenario(programs: &str) -> (Scenario, Programs) {
        let text = format!(
            "name = \"x\"\nduration_s = 9\nseed = 7\nsystems = [\"none\"]\n[machine]\nvcpus = 1\n\
             fast = {{ usable_mib = 1, latency_ns = 80, bandwidth_gbps = 50 }}\n\
             slow = {{ usable_mib = 1, latency_ns = 250, bandwidth_gbps = 20 }}\n\
             [workload]\nkind = \"program\"\n{programs}"
        );
        let scenario: Scenario = toml::from_str(&text).unwrap();
        let Workload::Program(programs) = scenario.workload.clone() else {
            panic!("{scenario:?}")
        };
        (scenario, programs)
    }

    #[test]
    fn in_place_a_program_has_its_folder_its_data_and_nothing_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        fs::write(&data, "text").unwrap();
        let (scenario, programs) = scenario(&format!(
            "[[workload.program]]\ncommand = [\"sh\", \"-c\", \"{{seed}}\"]\nfiles = [{data:?}]\n\
             env = {{ LANG = \"de\" }}\n"
        ));
        let own = folder.path().join("own");
        let finder = Finder {
            own: &own,
            tree: None,
        };
        let work = folder.path().join("work");
        let launches = in_place(&finder, &scenario, &programs, &work).unwrap();
        let [launch] = &launches[..] else {
            panic!("{launches:?}")
        };
        assert!(launch.file.is_absolute() && launch.file.ends_with("sh"));
        assert_eq!(launch.args, ["-c", "7"]);
        assert_eq!(launch.folder, work.join("sh"));
        assert_eq!(fs::read(work.join("sh/data")).unwrap(), b"text");
        assert_eq!((launch.env["LANG"].as_str(), launch.env.len()), ("de", 3));
        assert!(launch.env["PATH"].contains("/usr/bin"));

        fs::remove_file(data).unwrap();
        let again = folder.path().join("again");
        let said = in_place(&finder, &scenario, &programs, &again).unwrap_err();
        assert!(said.to_string().contains("there is no file"), "{said}");
    }

    #[test]
    fn in_place_a_shell_starts_other_programs_of_its_packages() {
        let needs = |file: &str| elf::needed(Path::new(file), &[]).unwrap().files;
        let of_shell = needs("/bin/sh");
        // A library that a shell does not need.
        let library = needs("/bin/ls")
            .into_iter()
            .find(|library| !of_shell.contains(library))
            .unwrap();
        let root = tempfile::tempdir().unwrap();
        let [programs_dir, libraries_dir] = ["usr/bin", "usr/lib"].map(|dir| root.path().join(dir));
        fs::create_dir_all(&programs_dir).unwrap();
        fs::create_dir_all(&libraries_dir).unwrap();
        fs::copy("/bin/ls", programs_dir.join("ls")).unwrap();
        let name = library.file_name().unwrap();
        fs::copy(&library, libraries_dir.join(name)).unwrap();
        let (scenario, programs) =
            scenario("[[workload.program]]\ncommand = [\"sh\", \"-c\", \"exec ls\"]\n");
        let finder = Finder {
            own: root.path(),
            tree: Some(Tree::at(root.path())),
        };
        let launches = in_place(&finder, &scenario, &programs, &root.path().join("work")).unwrap();
        let env = &launches[0].env;
        assert_eq!(env["LD_LIBRARY_PATH"], libraries_dir.display().to_string());
    }
}
