//! Who started this process: rank and world from the environment that a launcher sets.

use crate::error::{OpError, Result};

/// Port of the meeting point when `MASTER_PORT` is not set.
pub const DEFAULT_PORT: u16 = 29500;

/// Variables of one launcher: rank, world and rank on the host.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

/// The first launcher whose rank variable is set counts. Inside a batch script `SLURM_PROCID` is set too, the size of a step
/// only under `srun`.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    Launcher {
        name: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Launcher {
        name: "mpiexec",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_world: "SLURM_STEP_TASKS_PER_NODE",
    },
];

/// Place of this process among the processes of a job, one for each GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process, `0..world`.
    pub rank: usize,
    /// Number of processes.
    pub world: usize,
    /// Number of this process on its host, which is also the number of its GPU.
    pub local_rank: usize,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port on which rank 0 waits for the others.
    pub master_port: u16,
}

impl Launch {
    /// Reads the variables of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), mpirun, mpiexec or srun, and `MASTER_ADDR`,
    /// `MASTER_PORT`. None when no launcher started this process.
    ///
    /// torchrun listens on `MASTER_PORT` itself; rank 0 then waits on the next port. `BURN_MOE_MASTER_PORT` names another one.
    ///
    /// # Errors
    /// A variable that is missing or is not a number in its range.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        // srun sets the rank for the batch script as well, but no step size
        let started = |l: &&Launcher| var(l.rank).is_some() && (l.name != "srun" || var(l.world).is_some());
        let Some(launcher) = LAUNCHERS.iter().find(started) else {
            return Ok(None);
        };
        let rank: usize = number(launcher.rank, var(launcher.rank))?;
        let world: usize = number(launcher.world, var(launcher.world))?;
        if world == 0 {
            return Err(setting(launcher.world, "0", "at least 1"));
        }
        if rank >= world {
            return Err(setting(launcher.rank, rank, format!("below {} = {world}", launcher.world)));
        }
        let local_rank = match var(launcher.local_rank) {
            Some(text) => number(launcher.local_rank, Some(text))?,
            None if world == 1 => 0,
            None => {
                return Err(setting(
                    launcher.local_rank,
                    "nothing",
                    "the number of this process on its host, from 0",
                ));
            }
        };
        let one_host = var(launcher.local_world).is_some_and(|n| n.trim() == world.to_string());
        let master_addr = match var("MASTER_ADDR").filter(|addr| !addr.trim().is_empty()) {
            Some(addr) => addr.trim().to_string(),
            None if world == 1 || one_host => "127.0.0.1".into(),
            None => {
                let expected = "the host of rank 0, e.g. export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)";
                return Err(setting("MASTER_ADDR", "nothing", expected));
            }
        };
        let port = match var("MASTER_PORT") {
            Some(text) => number("MASTER_PORT", Some(text))?,
            None => DEFAULT_PORT,
        };
        let agent_listens = var("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        let master_port = match var("BURN_MOE_MASTER_PORT") {
            Some(text) => number("BURN_MOE_MASTER_PORT", Some(text))?,
            None if agent_listens => port.checked_add(1).unwrap_or(DEFAULT_PORT),
            None => port,
        };
        Ok(Some(Self {
            rank,
            world,
            local_rank,
            master_addr,
            master_port,
        }))
    }
}

fn number<T: std::str::FromStr>(name: &'static str, text: Option<String>) -> Result<T> {
    let text = text.unwrap_or_default();
    text.trim().parse().map_err(|_| {
        let found = if text.is_empty() { "nothing".into() } else { format!("\"{text}\"") };
        setting(name, found, "a whole number in range")
    })
}

fn setting(field: &'static str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> OpError {
    OpError::Setting {
        op: "launch",
        field,
        found: found.to_string(),
        expected: expected.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(vars: &[(&str, &str)]) -> Result<Option<Launch>> {
        Launch::from_vars(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn every_launcher_is_understood() {
        let expected = |port| Launch {
            rank: 3,
            world: 8,
            local_rank: 1,
            master_addr: "node7".into(),
            master_port: port,
        };
        let addr = ("MASTER_ADDR", "node7");
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            addr,
            ("MASTER_PORT", "400"),
        ];
        assert_eq!(launch(&torchrun).unwrap(), Some(expected(400)));
        let agent = [torchrun.as_slice(), &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(launch(&agent).unwrap(), Some(expected(401)));
        let named = [agent.as_slice(), &[("BURN_MOE_MASTER_PORT", "77")]].concat();
        assert_eq!(launch(&named).unwrap(), Some(expected(77)));
        let srun = [("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_LOCALID", "1"), addr];
        assert_eq!(launch(&srun).unwrap(), Some(expected(DEFAULT_PORT)));
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            addr,
        ];
        assert_eq!(launch(&mpirun).unwrap(), Some(expected(DEFAULT_PORT)));
    }

    #[test]
    fn a_plain_process_and_a_batch_script_are_no_launch() {
        assert_eq!(launch(&[]).unwrap(), None);
        assert_eq!(launch(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(), None);
    }

    #[test]
    fn ranks_of_one_host_need_no_address() {
        let vars = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(launch(&vars).unwrap().unwrap().master_addr, "127.0.0.1");
    }

    #[test]
    fn errors_name_the_variable() {
        for (vars, parts) in [
            (vec![("RANK", "0")], ["`WORLD_SIZE` is nothing", "a whole number"]),
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], ["`RANK` is \"x\"", "a whole number"]),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2")], ["`RANK` is 2", "below WORLD_SIZE = 2"]),
            (vec![("RANK", "0"), ("WORLD_SIZE", "0")], ["`WORLD_SIZE` is 0", "at least 1"]),
            (vec![("RANK", "0"), ("WORLD_SIZE", "2")], ["`LOCAL_RANK` is nothing", "on its host"]),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")],
                ["`MASTER_ADDR` is nothing", "scontrol"],
            ),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")],
                ["`MASTER_PORT` is \"70000\"", "in range"],
            ),
        ] {
            let error = launch(&vars).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{vars:?}: {error}");
        }
    }
}
